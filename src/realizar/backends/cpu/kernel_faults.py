"""`KernelFaults`: exceptions that compiled kernels raise in a walk, on any of its threads.

A kernel is a C function without a result: an exception in it ends its call on that thread, and Numba hands it to
`sys.unraisablehook`, which prints it and goes on. Here a hook in its place keeps those of threads that walk, for the
walk to raise; all others go on to the hook before. A kernel that fails still meets the others at the barrier after it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_NUMBA = "<numba."  # how Numba names what raised: its context, as text

_walking: dict[int, list[BaseException]] = {}  # by the walking thread: where its exceptions go
_installing = threading.Lock()


class KernelFaults:
    """The exceptions of one team's walks, in the order in which they came."""

    def __init__(self) -> None:
        self._found: list[BaseException] = []
        _install()

    def watch_thread(self) -> None:
        """Keep what kernels raise on the calling thread, until it watches for another team."""
        _walking[threading.get_ident()] = self._found

    def forget_thread(self) -> None:
        """Keep nothing more of the calling thread."""
        _walking.pop(threading.get_ident(), None)

    def take(self) -> list[BaseException]:
        """Return the faults since the last call."""
        found = self._found[:]
        del self._found[: len(found)]
        return found


def _install() -> None:
    """Install the hook once. It passes errors that no walk raised on to the hook before it."""
    with _installing:
        before = sys.unraisablehook
        if getattr(before, "keeps_kernel_faults", False):
            return

        def keep(unraisable: Any) -> None:
            found = _walking.get(threading.get_ident())
            of_kernel = isinstance(unraisable.object, str) and unraisable.object.startswith(_NUMBA)
            if found is None or not of_kernel or unraisable.exc_value is None:
                before(unraisable)
            else:
                found.append(unraisable.exc_value.with_traceback(None))

        keep.keeps_kernel_faults = True  # type: ignore[attr-defined]
        sys.unraisablehook = keep
