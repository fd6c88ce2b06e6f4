"""Compiled kernels on disk: those that came with the package, and those that this machine compiled.

Both are found by a digest of all sources of this package, the layouts of weights, the samplers whose parameters lie in
rows, and Numba's version, so none outlives the source that it was compiled from. They are compiled for the kind of this
processor, not for its model, so that all processors of a kind compute the same bits, with the package's kernels or
their own. Of a kind that we know none of they are compiled for the model, and none come with the package.

The cache saves time and nothing hangs on it. Where there is no place for it, kernels are compiled in memory. So they
are where the disk fills up while they are written, or where a file is broken. A warning says so once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import llvmlite
import numba

from realizar.backends.cpu.instruction_set import KINDS, host_features, known_kind
from realizar.errors import HubError
from realizar.hub.folders import user_cache
from realizar.sampling_params import SAMPLERS

_LOG = logging.getLogger(__name__)
_KEPT_FOLDERS = 4
_PACKAGE = Path(__file__).parent
_DIGEST_BYTES = 32
_BROKEN = (OSError, ValueError, zipfile.BadZipFile)


class CompiledKernel(NamedTuple):
    """An object file, and the symbol of the kernel in it."""

    symbol: str
    object_file: bytes

    def pack(self) -> bytes:
        """A digest of the rest, the symbol in a line, the object file."""
        rest = b"%s\n%s" % (self.symbol.encode(), self.object_file)
        return hashlib.sha256(rest).digest() + rest

    @classmethod
    def unpack(cls, packed: bytes) -> CompiledKernel:
        """ValueError where it is not what was packed."""
        digest, rest = packed[:_DIGEST_BYTES], packed[_DIGEST_BYTES:]
        if digest != hashlib.sha256(rest).digest():
            raise ValueError("a compiled kernel is broken")
        symbol, _, object_file = rest.partition(b"\n")
        return cls(symbol.decode(), object_file)


@cache
def digest() -> str:
    """Of what kernels are compiled from, and of the minor version of what compiles them: its functions are called."""
    made_by = ".".join(numba.__version__.split(".")[:2])
    found = hashlib.sha256(f"{made_by} {' '.join([each.name for each in SAMPLERS])}".encode())
    outside = (_PACKAGE.parents[1] / "models" / "spec.py", *(_PACKAGE.parents[1] / "quantization").glob("*.py"))
    for source in sorted((*_PACKAGE.rglob("*.py"), *outside)):
        found.update(source.read_bytes())
    return found.hexdigest()[:16]


@cache
def target() -> str:
    """What kernels are compiled for, as a folder is named. Numba is told with the first call.

    That comes before anything is compiled, unless the process has used Numba before, or says what to compile for.
    """
    from numba.core.registry import cpu_target

    config = numba.config
    own = known_kind(host_features())
    if config.CPU_NAME is None and own is not None and "_toplevel_target_context" not in vars(cpu_target):
        config.CPU_NAME, config.CPU_FEATURES = own.processor, own.target_features
    for kind in KINDS:
        if (kind.processor, kind.target_features) == (config.CPU_NAME, config.CPU_FEATURES):
            return kind.name
    _, processor, features = cpu_target.target_context.codegen().magic_tuple()
    return f"{processor}-{hashlib.sha256(f'{features} {llvmlite.__version__}'.encode()).hexdigest()[:16]}"


def compiles_for_target() -> bool:
    """Whether Numba, which has compiled, did it for the kind of processor that `target` names."""
    from numba.core.registry import cpu_target

    kinds = [(kind.processor, kind.target_features) for kind in KINDS if kind.name == target()]
    return all(tuple(cpu_target.target_context.codegen().magic_tuple()[1:]) == kind for kind in kinds)


def archive_of(kind: str) -> Path:
    """Where the package has its kernels for a kind of processor, if they are of these sources."""
    return _PACKAGE / "compiled" / f"{kind}-{digest()}.zip"


@cache
def _archive() -> zipfile.ZipFile | None:
    """The package's kernels for this processor; None where it has none that fit. They are compiled on Linux."""
    if sys.platform != "linux":
        return None
    try:
        return zipfile.ZipFile(archive_of(target()))
    except FileNotFoundError:
        return None
    except _BROKEN as error:
        _report(f"the package's kernels can't be read: {error}")
        return None


def cache_folder() -> Path:
    """Folder of this version's compiled kernels, under XDG_CACHE_HOME or ~/.cache; HubError where there is no home."""
    return user_cache() / "kernels" / digest()


def forget_old_folders(root: Path, own: Path, keep: int = _KEPT_FOLDERS) -> None:
    """Delete all but `own` and the folders used last; a clock that was set back makes `own` the oldest."""
    others = [path for path in root.iterdir() if path.is_dir() and path != own]
    folders = [*sorted(others, key=lambda path: path.stat().st_mtime), own]
    for folder in folders[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def use_cache_folder() -> Path | None:
    """The folder for this processor's kernels, made if need be; None where nothing can be written."""
    try:
        folder = cache_folder()
        known = folder.exists()
        place = folder / target()
        place.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        tempfile.TemporaryFile(dir=place).close()
        if not known:
            forget_old_folders(folder.parent, folder)
    except (OSError, HubError) as error:
        _report(str(error))
        return None
    return place


def has_kernel(name: str) -> bool:
    archive = _archive()
    if archive is not None and name in archive.NameToInfo:
        return True
    folder = use_cache_folder()
    return folder is not None and (folder / name).exists()


def read_kernel(name: str) -> CompiledKernel | None:
    """A kernel of the package or of the cache; None where it is in neither, or can't be read."""
    archive, folder = _archive(), use_cache_folder()
    places: list[Callable[[], bytes]] = [] if archive is None else [partial(archive.read, name)]
    places += [] if folder is None else [(folder / name).read_bytes]
    for read in places:
        try:
            return CompiledKernel.unpack(read())
        except (KeyError, FileNotFoundError):
            continue
        except _BROKEN as error:
            _report(str(error))
    return None


def keep_kernel(name: str, code: CompiledKernel) -> None:
    """Write a kernel into the cache; a warning where it can't be written."""
    folder = use_cache_folder()
    if folder is None:
        return
    try:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            Path(own, name).write_bytes(code.pack())
            Path(own, name).replace(folder / name)
    except OSError as error:
        _report(str(error))


_REPORTED: list[str] = []


def _report(reason: str) -> None:
    if not _REPORTED:
        _LOG.warning("the kernel cache fails (%s); this process compiles its own kernels", reason)
    _REPORTED.append(reason)
