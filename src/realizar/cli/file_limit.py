"""The limit of open files, which bounds the number of connections. POSIX."""

from __future__ import annotations

import resource

from realizar.errors import RealizarError

_OWN_FILES = 64  # the model, the engine's sockets, the log, the event loop, and connections that are being refused


def fit_connections(wanted: int) -> int:
    """Raise the limit of open files as far as needed and allowed; returns the number of connections that fit.

    Raises:
        RealizarError: no connection fits.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OWN_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (ValueError, OSError):  # macOS has a limit of its own below the hard one
        most = soft
    if most <= _OWN_FILES:
        raise RealizarError(f"this process may open {most} files (ulimit -n); a server needs more than {_OWN_FILES}")
    return most - _OWN_FILES
