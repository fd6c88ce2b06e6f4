"""Which backend runs a model. Standard library until one is chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Literal

from realizar.backends.base import Backend
from realizar.config import DeviceChoice
from realizar.errors import CapacityError, UnsupportedModelError

Device = Literal["cuda", "cpu"]

STEPS_IN_FLIGHT: dict[Device, int] = {"cuda": 2, "cpu": 1}
"""Steps that a backend is given before the first one's result is asked for."""


def choose_device(wanted: DeviceChoice) -> Device:
    """The device of a choice; torch is imported only where there is a GPU to find.

    Raises:
        UnsupportedModelError: a GPU is wanted and torch or triton is not installed.
        CapacityError: a GPU is wanted and torch can use none.
    """
    if wanted == "cpu":
        return "cpu"
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if wanted == "cuda":
        if missing:
            raise UnsupportedModelError(f"--device cuda needs {' and '.join(missing)}: pip install 'realizar[cuda]'")
        if not _gpu_usable():
            raise CapacityError("no GPU can be used: torch finds none (--device cpu runs without one)")
        return "cuda"
    return "cuda" if not missing and _gpu_usable() else "cpu"


def make_backend(device: Device, progress: Callable[[str, float], None] | None = None) -> Backend:
    """A backend, not loaded yet; compilers are imported here and not before."""
    if device == "cuda":
        from realizar.backends.cuda.runner import CUDABackend

        return CUDABackend(progress)
    from realizar.backends.cpu.compile_events import on_compiling

    with on_compiling(
        lambda: None if progress is None else progress("compiling kernels for this processor, once", 1.0)
    ):
        from realizar.backends.cpu.runner import CPUBackend  # some kernels are compiled with their modules

    return CPUBackend(progress)


def _gpu_usable() -> bool:
    from realizar.backends.cuda.presence import gpu_listed

    if not gpu_listed():
        return False
    from realizar.backends.cuda.device import gpu_usable

    return gpu_usable()
