"""Kernels made once per process and compiled into an on-disk cache that dies with the sources it came from.

Numba stamps a cached function with its own file only, and our intrinsics live in others. So the cache folder is named
by a digest of all sources of this package and the versions of the compilers.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import llvmlite
import numba
import numpy as np


def cache_folder() -> Path:
    """Folder of this version's compiled kernels, under XDG_CACHE_HOME or ~/.cache."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {np.__version__}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "realizar" / "kernels" / digest.hexdigest()[:16]


@cache
def use_cache_folder() -> Path:
    """Point Numba at the folder. Call before any kernel module is imported."""
    folder = cache_folder()
    numba.config.CACHE_DIR = str(folder)
    return folder
