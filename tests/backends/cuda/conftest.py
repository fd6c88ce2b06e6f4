"""Kernels of the GPU backend under Triton's interpreter, where there is no GPU: it is chosen when they are defined."""

from __future__ import annotations

import importlib.util
import os


def _interpret() -> None:
    """Turn Triton's interpreter on before anything imports triton, which decorates its own functions at import."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        from backends.cuda import triton_interpreter  # noqa: F401


_interpret()
