"""Kernels of the GPU backend under Triton's interpreter: it is chosen when kernels are defined, so before any import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.append(_TESTS)


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


if not _has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")
