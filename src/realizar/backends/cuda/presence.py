"""Detection of a GPU by its device node, without importing torch. Standard library only."""

from __future__ import annotations

from pathlib import Path

_NODES = ("nvidia[0-9]*", "dxg", "kfd")  # NVIDIA's; Windows' GPU inside Linux; AMD's


def gpu_listed(devices: Path = Path("/dev")) -> bool:
    """True if a driver has made its device node."""
    return any(any(devices.glob(pattern)) for pattern in _NODES)
