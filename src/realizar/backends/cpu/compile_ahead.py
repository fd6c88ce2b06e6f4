"""Kernels that must be compiled, by several processes at once: Numba compiles on one thread of a process at a time.

`python -m realizar.backends.cpu.compile_ahead TARGET` is such a process: it reads names of kernels, a line each, writes
each kernel into the cache, and answers with a line.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import TracebackType

from realizar.backends.cpu.codegen.formats import format_number, packed_format
from realizar.backends.cpu.kernel import Kernel, make_kernel
from realizar.backends.cpu.kernel_cache import target, use_cache_folder
from realizar.backends.cpu.weights.pack import REPACKED

_COMMAND = (sys.executable, "-m", "realizar.backends.cpu.compile_ahead")
_FEW_COLLECTIONS = 100_000  # 700 by default, whose collections take a twentieth of compiling, and find little
_MOST_PROCESSES = 8  # each takes some 200 MB, and the kernel that takes longest bounds what more of them gain


class CompileAhead:
    """Compiles kernels beside the block of a `with` statement, at whose end they are there.

    What the processes leave, as where none can be started, is compiled by this one when it is first called. The first
    one goes on with what `begin` has begun.

    Args:
        kernels: those that take longest first. What was compiled before costs nothing.
        cores: how many processes compile, at most.
        on_compile: is called with what is done, where the block ends before it.
    """

    def __init__(self, kernels: Iterable[Kernel], cores: int, on_compile: Callable[[str], None]) -> None:
        before = _begun.pop() if _begun else None
        missing = dict.fromkeys(each.name for each in kernels if not each.is_compiled)
        self._given: set[str] = set() if before is None else before._given
        self._names: SimpleQueue[str | None] = SimpleQueue() if before is None else before._names
        self._threads: list[threading.Thread] = [] if before is None else before._threads
        for name in missing:
            if name not in self._given:
                self._names.put(name)
        self._given.update(missing)
        self._missing, self._on_compile = len(missing), on_compile
        count = 0 if use_cache_folder() is None else min(cores, len(missing), _MOST_PROCESSES)
        self._new = [threading.Thread(target=self._compile, daemon=True) for _ in range(count - len(self._threads))]
        self._threads += self._new

    def __enter__(self) -> None:
        self.start()
        self._end_threads()

    def start(self) -> None:
        """Start the processes, which wait for more when they have done what there is."""
        for thread in self._new:
            thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        if kind is not None:
            with suppress(Empty):
                while True:
                    self._names.get_nowait()
            self._end_threads()
            return
        if self._missing and (not self._threads or any(thread.is_alive() for thread in self._threads)):
            self._on_compile(f"compiling {self._missing} kernels for this processor, once")
        for thread in self._threads:
            thread.join()

    def _end_threads(self) -> None:
        """Let each end when it has done what there is."""
        for _ in self._threads:
            self._names.put(None)

    def _compile(self) -> None:
        """Have a process compile one kernel after another; it ends with this one, or where it fails."""
        with suppress(OSError), subprocess.Popen(
            (*_COMMAND, target()), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            while (name := self._names.get()) is not None:
                print(name, file=process.stdin, flush=True)
                if not process.stdout.readline():
                    return


_begun: list[CompileAhead] = []


def begin(kernels: Iterable[Kernel], cores: int) -> None:
    """Compile kernels from now on, as while a model is fetched; the next `CompileAhead` is to have them too."""
    begun = CompileAhead(kernels, cores, lambda _: None)
    begun.start()
    _begun.append(begun)


def main() -> None:
    if sys.argv[1:] != [target()]:
        return  # who asked uses Numba for more than kernels, and compiles for its own processor's model
    for layout in REPACKED:
        format_number(packed_format(layout))
    gc.freeze()
    gc.set_threshold(_FEW_COLLECTIONS)
    for line in sys.stdin:
        make_kernel(line).keep()
        sys.stdout.write("\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
