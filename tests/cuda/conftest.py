"""Kernels of the GPU backend under Triton's interpreter, where there is no GPU: it is chosen when they are defined."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

_TESTS = str(Path(__file__).parent.parent)
if _TESTS not in sys.path:
    sys.path.append(_TESTS)


def _interpret() -> None:
    """Before anything imports triton, whose own functions are made when it is imported."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        import triton_interpreter  # noqa: F401


_interpret()
