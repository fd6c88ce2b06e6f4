"""Triton's kernels that the host launches: a thread can have its launches handed over, to be compiled alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

_thread = threading.local()


class LaunchedKernel(JITFunction[Any]):
    @property
    def cache_key(self) -> str:
        """Of the source and all that it calls, for Triton's files. Triton leaves out constants of a function that was
        not hashed before, so that the key would depend on which kernels a process compiles first.
        """
        if self.hash is None:
            for each in _called_by(self):
                _ = each.cache_key
        return str(super().cache_key)

    def __getitem__(self, grid: Any) -> Any:
        """What launches it over a grid, or within `planning` hands the launch over."""
        into = getattr(_thread, "into", None)
        return super().__getitem__(grid) if into is None else partial(into, self, grid)


def launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`triton.jit`, also with its options, of what the host launches; what kernels call is left to `triton.jit`."""
    if function is None:
        return partial(launched, **options)
    return triton.jit(function, **options) if knobs.runtime.interpret else LaunchedKernel(function, **options)


def _called_by(function: JITFunction[Any]) -> Iterator[JITFunction[Any]]:
    """What a function calls, directly or not, each behind all that it calls itself; some more than once."""
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITFunction):
            yield from _called_by(called)
            yield called


def begin_hashing() -> None:
    """Have a thread hash Triton's own files, of which the key of each compiled kernel is made, before it is asked for.

    It takes 0.4 s, and 2 where they are read from a disk, once in a process.
    """
    with suppress(ImportError):  # it is no part of Triton's interface
        from triton.runtime.cache import triton_key

        threading.Thread(target=triton_key, name="realizar-triton-key", daemon=True).start()


@contextmanager
def planning(into: Callable[..., None]) -> Iterator[None]:
    """A block in which this thread's launches start nothing: `into` gets kernel, grid and arguments of each."""
    _thread.into = into
    try:
        yield
    finally:
        _thread.into = None
