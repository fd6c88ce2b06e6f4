"""CUDA C++ to machine code by NVRTC, kept on disk; needs `cuda-bindings` and NVRTC's wheel, neither a GPU nor nvcc."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import count
from pathlib import Path
from queue import SimpleQueue

from realizar.backends.cuda.native import nvrtc
from realizar.backends.machine import num_processors
from realizar.errors import KernelError
from realizar.extras import how_to_install
from realizar.hub.folders import user_cache

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel before compilation: the name of its entry point, or of a family with several, and the whole program.

    `shared_bytes`: of dynamic shared memory, with which it is launched.
    """

    name: str
    text: str
    shared_bytes: int = 0


@cache
def read(file: str) -> str:
    return resources.files("realizar.backends.cuda.native").joinpath(file).read_text(encoding="utf-8")


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a compute capability; from 9.0 on with the features of that architecture alone."""
    major, minor = capability
    return f"sm_{major}{minor}a" if major >= 9 else f"sm_{major}{minor}"


def compile_source(source: Source, arch: str) -> bytes:
    """The cubin of a kernel for `sm_80`, `sm_90a` and so on, from the cache where it is there.

    Raises KernelError where NVRTC is missing or refuses the source, with the first lines of its log.
    """
    return compile_sources([source], arch)[0]


def compile_sources(
    sources: Sequence[Source], arch: str, compiled: Callable[[int, int], None] | None = None
) -> list[bytes]:
    """The cubins of several kernels; those that are not in the cache are compiled side by side, a process each.

    `compiled` is called, by any thread, with the number compiled so far and the number to compile. Raises as
    `compile_source` does.
    """
    paths = [_path(source, arch) for source in sources]
    missing = {path: source for path, source in zip(paths, sources, strict=True) if not path.exists()}
    done = count()

    def built(path: Path, source: Source) -> bytes:
        with _lock:
            begun = _begun.get(path)
        if begun is None and len(missing) == 1:
            cubin = _compile_here(source, arch)
            _keep(path, cubin)
        else:
            cubin = (begun or _begin(path, source, arch)).result()
        if compiled is not None:
            compiled(next(done) + 1, len(missing))
        return cubin

    begin_compiling(list(missing.values()) if len(missing) > 1 else [], arch)
    try:
        cubins = {path: built(path, source) for path, source in missing.items()}
    finally:
        with _lock:
            for path in paths:
                _begun.pop(path, None)
    return [cubins[path] if path in cubins else path.read_bytes() for path in paths]


_begun: dict[Path, Future[bytes]] = {}
_lock = threading.Lock()


def begin_compiling(sources: Sequence[Source], arch: str) -> None:
    """Have kernels that are not in the cache compiled, as many at once as there are processors, the longest first.

    `compile_sources` waits for them, and raises what they fail with. Raises KernelError where NVRTC is missing.
    """
    missing = {path: source for source in sources if not (path := _path(source, arch)).exists()}
    for path, source in sorted(missing.items(), key=lambda pair: -len(pair[1].text)):
        _begin(path, source, arch)


def is_compiling() -> bool:
    """True if kernels that were begun are not all compiled."""
    with _lock:
        return any(not made.done() for made in _begun.values())


def _begin(path: Path, source: Source, arch: str) -> Future[bytes]:
    def build() -> bytes:
        cubin = _compile_aside(source, arch)
        _keep(path, cubin)
        return cubin

    with _lock:
        if path not in _begun:
            _begun[path] = Future()
            _jobs().put((_begun[path], build))
        return _begun[path]


@cache
def _jobs() -> SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]]:
    """What threads do in turn, each with a process; they are no reason for this process to stay."""
    jobs = SimpleQueue[tuple[Future[bytes], Callable[[], bytes]]]()

    def work() -> None:
        while True:
            made, build = jobs.get()
            try:
                made.set_result(build())
            except Exception as error:  # noqa: BLE001 - whoever waits for it raises it
                made.set_exception(error)

    for number in range(num_processors()):
        threading.Thread(target=work, name=f"realizar-nvrtc-{number}", daemon=True).start()
    return jobs


def _path(source: Source, arch: str) -> Path:
    digest = hashlib.sha256(f"{_version()} {arch} {nvrtc.OPTIONS}\n{source.text}".encode()).hexdigest()[:32]
    return cache_folder() / f"{source.name}-{digest}.cubin"


def _version() -> str:
    try:
        return nvrtc.version()
    except (ImportError, RuntimeError) as error:
        raise KernelError(f"NVRTC is not installed ({error}): {how_to_install('cuda')}") from error


def _compile_here(source: Source, arch: str) -> bytes:
    try:
        return nvrtc.compile_text(source.name, source.text, arch)
    except ValueError as error:
        raise KernelError(f"kernel {source.name} does not compile for {arch}: {error}", source.name) from error


def _compile_aside(source: Source, arch: str) -> bytes:
    command = [sys.executable, nvrtc.__file__, source.name, arch]
    result = subprocess.run(command, input=source.text.encode(), capture_output=True, check=False)
    if result.returncode != 0:
        reason = result.stderr.decode(errors="replace")[-600:]
        raise KernelError(f"kernel {source.name} does not compile for {arch}: {reason}", source.name)
    return result.stdout


def cache_folder() -> Path:
    """The folder of compiled kernels, under XDG_CACHE_HOME or ~/.cache."""
    return user_cache() / "cubins"


def _keep(path: Path, cubin: bytes) -> None:
    """Write through a file of another name, so that no process reads half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(cubin)
                file.flush()
                Path(file.name).replace(path)
            except OSError:  # a disk that is full keeps no half of it either
                Path(file.name).unlink()
                raise
    except OSError as error:
        _warn_unkept(path.parent, str(error))


@cache
def _warn_unkept(folder: Path, reason: str) -> None:
    """Once for a folder and a reason, and not for each kernel."""
    _LOG.warning("compiled kernels can't be saved in %s (%s); this process compiles its own", folder, reason)
