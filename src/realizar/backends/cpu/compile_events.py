"""Reports when the compiler is really at work: a kernel that is in the cache of compiled kernels is not compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event


class _FirstPass(event.Listener):  # type: ignore[misc]  # numba has no types
    """Calls back when the compiler's first pass over anything begins; a cached kernel goes through none."""

    def __init__(self, compiling: Callable[[], None]) -> None:
        self._compiling: Callable[[], None] | None = compiling

    def on_start(self, _event: Any) -> None:
        if self._compiling is not None:
            compiling, self._compiling = self._compiling, None
            compiling()

    def on_end(self, _event: Any) -> None:
        """Nothing: only whether it began matters."""


@contextmanager
def on_compiling(compiling: Callable[[], None]) -> Iterator[None]:
    """Call back once, if anything is compiled in the context."""
    with event.install_listener("numba:run_pass", _FirstPass(compiling)):
        yield
