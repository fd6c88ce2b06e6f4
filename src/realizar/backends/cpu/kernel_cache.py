"""Kernels made once per process and compiled into an on-disk cache that dies with the sources it came from.

Numba stamps a cached function with its own file only, and our intrinsics live in others. So the cache folder is named
by a digest of all sources of this package and the versions of the compilers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import llvmlite
import numba
import numpy as np

_LOG = logging.getLogger(__name__)
_KEPT_FOLDERS = 4


def cache_folder() -> Path:
    """Folder of this version's compiled kernels, under XDG_CACHE_HOME or ~/.cache."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {np.__version__}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "realizar" / "kernels" / digest.hexdigest()[:16]


def forget_old_folders(root: Path, keep: int = _KEPT_FOLDERS) -> None:
    """Delete all but the folders used last: each holds one version's kernels, and versions come and go."""
    folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def use_cache_folder() -> Path:
    """Point Numba at the folder. Call before any kernel module is imported."""
    folder = cache_folder()
    try:
        known = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        if not known:
            forget_old_folders(folder.parent)
    except OSError as error:
        _LOG.warning("compiled kernels can't be kept in %s (%s): this process compiles its own", folder, error)
        folder = Path(tempfile.mkdtemp(prefix="realizar-kernels-"))
    numba.config.CACHE_DIR = str(folder)
    return folder
