"""Which backend runs a model, on which device. Standard library until one is chosen."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from realizar.backends.base import Backend
from realizar.backends.memory_plan import MemoryPlan
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.errors import CapacityError, UnsupportedModelError
from realizar.extras import how_to_install
from realizar.models.spec import ModelSpec

if TYPE_CHECKING:
    from realizar.backends.cuda.cards import Card

_LOG = logging.getLogger(__name__)

Device = Literal["cuda", "cpu"]

STEPS_IN_FLIGHT: dict[Device, int] = {"cuda": 2, "cpu": 1}
"""Steps that a backend is given before the first one's result is asked for."""

TILE_TOKENS: dict[Device, int] = {"cuda": 64, "cpu": 12}
"""Tokens that matrix products take at once: a step with one more takes as long as one that fills a further tile."""


@dataclass(frozen=True, slots=True)
class ChosenDevice:
    """Where a model runs.

    Attributes:
        index: of the GPU. name: as its driver gives it; empty for the CPU.
    """

    kind: Device = "cpu"
    index: int = 0
    name: str = ""

    @property
    def label(self) -> str:
        """For people: `cpu`, or a GPU's number and name."""
        return f"cuda:{self.index}, {self.name}" if self.kind == "cuda" else "cpu"


THE_CPU = ChosenDevice()


def choose_device(wanted: str) -> ChosenDevice:
    """The device of a choice; torch is imported only where there is a GPU to find.

    Args:
        wanted: `cpu`; `cuda`, the first GPU that can run a model; `cuda:1` and so on; or `auto`, that GPU, or the CPU
            where there is none. A GPU that is passed over is logged with the reason.

    Raises:
        UnsupportedModelError: a GPU is wanted, and it or what is installed can't run a model.
        CapacityError: a GPU is wanted, and there is none, or none of that number.
    """
    if wanted == "cpu":
        return THE_CPU
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if wanted == "auto":
        return _choose_any(missing)
    if missing:
        raise UnsupportedModelError(f"--device cuda needs {' and '.join(missing)}: {how_to_install('cuda')}")
    cards, reason = _find_cards()
    if not cards:
        raise CapacityError(f"no GPU can be used: {reason or 'torch finds none'} (--device cpu runs without one)")
    if wanted == "cuda":
        card = next((card for card in cards if card.fault is None), cards[0])
    else:
        index = int(wanted.partition(":")[2])
        if index >= len(cards):
            there = "1 GPU, cuda:0" if len(cards) == 1 else f"{len(cards)} GPUs, cuda:0 to cuda:{len(cards) - 1}"
            raise CapacityError(f"--device {wanted}: this machine has {there}")
        card = cards[index]
    if card.fault is not None:
        raise UnsupportedModelError(f"{card.label}: {card.fault}")
    return ChosenDevice("cuda", card.index, card.name)


def gpu_facts() -> tuple[list[dict[str, Any]], str | None]:
    """Each GPU that torch lists, for reports; and why there is none, where one would be expected."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "triton")):
        return [], None
    cards, reason = _find_cards()
    if not cards:
        return [], reason
    from realizar.backends.cuda.cards import free_memory

    return [
        {
            "device": f"cuda:{card.index}",
            "name": card.name,
            "compute_capability": "{}.{}".format(*card.capability),
            "memory_bytes": card.memory_bytes,
            "free_bytes": free_memory(card.index) if card.fault is None else None,
            "fault": card.fault,
        }
        for card in cards
    ], reason


def make_backend(device: ChosenDevice, progress: Callable[[str, float], None] | None = None) -> Backend:
    """A backend, not loaded yet; compilers are imported here and not before.

    Raises:
        CapacityError: the GPU can't be opened.
    """
    if device.kind == "cuda":
        from realizar.backends.cuda.device import open_device
        from realizar.backends.cuda.runner import CUDABackend

        return CUDABackend(progress, open_device(device.index))
    from realizar.backends.cpu.compile_events import on_compiling

    with on_compiling(
        lambda: None if progress is None else progress("compiling kernels for this processor, once", 1.0)
    ):
        from realizar.backends.cpu.runner import CPUBackend  # some kernels are compiled with their modules

    return CPUBackend(progress)


def plan_memory(device: ChosenDevice, spec: ModelSpec, checkpoint: Checkpoint, config: EngineConfig) -> MemoryPlan:
    """What a model will take of the memory that is free now, from its header alone.

    Raises:
        CheckpointError: a tensor is missing, left over or of the wrong shape.
        UnsupportedModelError: a tensor's type does not run.
        CapacityError: the block size does not suit the device.
    """
    if device.kind == "cuda":
        from realizar.backends.cuda import plan as cuda_plan
        from realizar.backends.cuda.device import free_bytes, open_device

        return cuda_plan.plan_memory(spec, checkpoint, config, free_bytes(open_device(device.index)))
    from realizar.backends.cpu.plan import plan_memory as plan_for_cpu

    before = plan_for_cpu(spec, checkpoint, config)
    after = plan_for_cpu(spec, checkpoint, config, max(before.free_bytes - before.needed_bytes, 0))
    return replace(after, free_bytes=before.free_bytes)  # the cache is cut from what loading leaves


def _choose_any(missing: list[str]) -> ChosenDevice:
    """The first GPU that can run a model, else the CPU, with a log line where a GPU is passed over."""
    from realizar.backends.cuda.presence import gpu_listed

    if not gpu_listed():
        return THE_CPU
    if missing:
        _LOG.info("a GPU is listed and not used: %s not installed (realizar doctor)", " and ".join(missing))
        return THE_CPU
    cards, reason = _find_cards()
    for card in cards:
        if card.fault is None:
            return ChosenDevice("cuda", card.index, card.name)
    faults = [f"{card.label}: {card.fault}" for card in cards] or [reason or "torch finds none"]
    _warn_once(f"the model runs on the CPU, as no GPU can be used: {'; '.join(faults)}")
    return THE_CPU


def _find_cards() -> tuple[list[Card], str | None]:
    """Of `cards.find_cards`; a torch that can't be imported is a reason."""
    from realizar.backends.cuda.presence import gpu_listed

    if not gpu_listed():
        return [], None
    try:
        from realizar.backends.cuda.cards import find_cards
    except (ImportError, OSError) as error:  # a library of CUDA's that is missing or of another version
        return [], f"torch can't be imported: {error}"
    return find_cards()


@cache
def _warn_once(text: str) -> None:
    _LOG.warning("%s", text)
