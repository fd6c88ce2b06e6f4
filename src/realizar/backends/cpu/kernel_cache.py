"""Kernels made once per process and compiled into an on-disk cache that dies with the sources it came from.

Numba stamps a cached function with its own file only, and our intrinsics live in others. So the cache folder is named
by a digest of all sources of this package, the samplers whose parameters lie in rows, and the versions of the
compilers.

The cache saves time and nothing hangs on it. Where there is no place for it, kernels are compiled in memory. So they
are where the disk fills up while they are written, or where a file is broken. A warning says so once.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import caching

from realizar.errors import HubError
from realizar.hub.folders import user_cache
from realizar.sampling_params import SAMPLERS

_LOG = logging.getLogger(__name__)
_KEPT_FOLDERS = 4


def cache_folder() -> Path:
    """Folder of this version's compiled kernels, under XDG_CACHE_HOME or ~/.cache; HubError where there is no home."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {np.__version__}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    digest.update(" ".join([each.name for each in SAMPLERS]).encode())
    return user_cache() / "kernels" / digest.hexdigest()[:16]


def forget_old_folders(root: Path, own: Path, keep: int = _KEPT_FOLDERS) -> None:
    """Delete all but `own` and the folders used last; a clock that was set back makes `own` the oldest."""
    others = [path for path in root.iterdir() if path.is_dir() and path != own]
    folders = [*sorted(others, key=lambda path: path.stat().st_mtime), own]
    for folder in folders[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def use_cache_folder() -> Path | None:
    """Point Numba at the folder; None where nothing can be written. Call before any kernel module is imported."""
    try:
        folder = cache_folder()
        known = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        tempfile.TemporaryFile(dir=folder).close()
        if not known:
            forget_old_folders(folder.parent, folder)
    except (OSError, HubError) as error:
        _report(str(error))
        return None
    numba.config.CACHE_DIR = str(folder)
    # Numba would look for another place, such as the folder of our sources, where the disk has filled up since.
    numba.config.CACHE_LOCATOR_CLASSES = f"{__name__}.{KernelLocator.__qualname__}"
    caching.Cache._guard_against_spurious_io_errors = _guard
    return folder


def is_kept() -> bool:
    """True if compiled kernels are kept on disk; the value of `cache=` in Numba's decorators."""
    return use_cache_folder() is not None


class KernelLocator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """Numba's cache in the folder given to it, without a look for others where that one can't be written now.

    Another installation of the same sources, as `uvx` and `pipx` make them, finds the kernels too.
    """

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Of our own files the place below this folder; Numba's has a digest of the installation's path in it."""
        folder, root = Path(py_file).absolute().parent, Path(__file__).absolute().parent
        if folder.is_relative_to(root):
            return "-".join(("cpu", *folder.relative_to(root).parts))
        return str(super().get_suitable_cache_subpath(py_file))

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> KernelLocator:
        return cls(py_func, py_file)


@contextlib.contextmanager
def _guard(kernel_cache: caching.Cache) -> Iterator[None]:
    """Around Numba's reading and writing of one function's cache; what is swallowed here is compiled instead."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a broken file may raise whatever unpickling and LLVM raise
        _report(str(error) or type(error).__name__)
        if isinstance(error, OSError):
            kernel_cache.disable()
            return
        with contextlib.suppress(OSError):
            kernel_cache.flush()  # the file is broken: the next process finds none and writes it anew


_REPORTED: list[str] = []


def _report(reason: str) -> None:
    if not _REPORTED:
        _LOG.warning("the kernel cache can't be written (%s); this process compiles its own kernels", reason)
    _REPORTED.append(reason)
