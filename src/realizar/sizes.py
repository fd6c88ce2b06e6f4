"""Formatting of sizes in bytes and of large numbers. Standard library only."""

from __future__ import annotations

_UNITS = ((1, "B", 0), (10**3, "kB", 1), (10**6, "MB", 1), (10**9, "GB", 2), (10**12, "TB", 2))


def format_bytes(num_bytes: float) -> str:
    """Format a size in units of 1,000, as hubs and disks do: `98.4 MB`, `1.51 GB`."""
    for unit, name, digits in _UNITS:
        if round(num_bytes / unit, digits) < 1000 or name == "TB":
            break
    return f"{num_bytes / unit:.{digits}f} {name}"


def format_count(count: int) -> str:
    """Format a number of parameters: `134.5 million`, `30.53 billion`."""
    if count < 10**5:
        return str(count)
    return f"{count / 1e6:.1f} million" if count < 999_950_000 else f"{count / 1e9:.2f} billion"
