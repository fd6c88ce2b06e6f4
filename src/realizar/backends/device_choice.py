"""Choice of the device that runs a model. Standard library until a GPU is looked for."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realizar.backends.devices import THE_CPU, ChosenDevice
from realizar.errors import CapacityError, UnsupportedModelError
from realizar.extras import how_to_install

if TYPE_CHECKING:
    from realizar.backends.cuda.cards import Card

_LOG = logging.getLogger(__name__)
_NODES = ("nvidia[0-9]*", "dxg", "kfd")  # of NVIDIA's GPUs, of Windows' inside Linux, of AMD's


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
    if wanted == "auto":
        return _choose_any()
    if missing := _missing_packages():
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
    return _chosen(card)


def begin_context(wanted: str) -> None:
    """Have a thread make the context of a GPU beside the import of torch, which finds it then: half a second otherwise.

    Of a choice as of `choose_device`, or else of the first GPU. Where that fails, whoever opens the device says why.
    """
    if may_be_gpu(wanted):
        index = int(wanted.partition(":")[2] or 0)
        threading.Thread(target=_make_context, args=(index,), name="realizar-context", daemon=True).start()


def _make_context(index: int) -> None:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with suppress(OSError, AttributeError):  # another maker's driver, or an older one
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def gpu_facts() -> tuple[list[dict[str, Any]], str | None]:
    """Each GPU that torch lists, for reports; and why there is none, where one would be expected."""
    cards, reason = ([], None) if _missing_packages() else _find_cards()
    return [card.facts() for card in cards], reason


def choose_planned_device(wanted: str, *, memory_given: bool) -> ChosenDevice:
    """The device of a choice, to plan for: where its memory is given, a GPU need not be there, and is of 9.0.

    Raises as `choose_device`.
    """
    if wanted in ("auto", "cpu") or not memory_given or importlib.util.find_spec("torch") is None:
        return choose_device(wanted)  # or it says what is missing
    return ChosenDevice("cuda", capability=(9, 0))


def _chosen(card: Card) -> ChosenDevice:
    return ChosenDevice("cuda", card.index, card.name, card.capability)


def gpu_listed(devices: Path = Path("/dev")) -> bool:
    """True if a driver has made a GPU's device node."""
    return any(any(devices.glob(pattern)) for pattern in _NODES)


def may_be_gpu(wanted: str) -> bool:
    """True if a choice can fall on a GPU: one is listed, and what runs models there is installed."""
    return wanted != "cpu" and gpu_listed() and not _missing_packages()


def _missing_packages() -> list[str]:
    return [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]


def _choose_any() -> ChosenDevice:
    """The first GPU that can run a model, else the CPU, with a log line where a GPU is passed over."""
    if not gpu_listed():
        return THE_CPU
    if missing := _missing_packages():
        _LOG.info("a GPU is listed and not used: %s not installed (realizar doctor)", " and ".join(missing))
        return THE_CPU
    cards, reason = _find_cards()
    for card in cards:
        if card.fault is None:
            return _chosen(card)
    faults = [f"{card.label}: {card.fault}" for card in cards] or [reason or "torch finds none"]
    _warn_once(f"the model runs on the CPU, as no GPU can be used: {'; '.join(faults)}")
    return THE_CPU


def _find_cards() -> tuple[list[Card], str | None]:
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
