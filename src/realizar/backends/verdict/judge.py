"""`judge`: a verdict on a GPU, by a small model; and which families of kernels to go on without. torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from realizar.backends.cuda.device import SLOWER, DeviceProfile, Family
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.devices import ChosenDevice
from realizar.backends.resolved_config import resolve_config
from realizar.backends.verdict.compare import difference
from realizar.backends.verdict.small_models import SmallModel
from realizar.backends.verdict.small_steps import CONFIG, run_small_steps
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import KernelError, RequestFailedError, StepError
from realizar.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a comparison.

    Attributes:
        fault: the difference that was seen at first; None where there was none.
        without: families of kernels without which there is none, beside those that the card refuses.
        hopeless: a difference stays, whatever is given up.
    """

    fault: str | None
    without: frozenset[Family]
    hopeless: bool


AGREES = Verdict(None, frozenset(), False)


def judge(model: SmallModel, device: DeviceProfile) -> Verdict:
    """Compare a GPU by a model; where it differs, find the fewest families without which it does not.

    Raises:
        KernelError: a kernel fails while the model is loaded, and nothing takes its place.
        DeviceLostError: the device's context is lost.
        CapacityError: the model does not fit.
        NoComparisonError: as of `difference`.
    """
    spec, checkpoint = model.make()

    def differs(without: frozenset[Family]) -> str | None:
        return _difference(model, spec, checkpoint, replace(device, without=device.without | without))

    with _quiet():
        fault = differs(frozenset())
        if fault is None:
            return AGREES
        families = [family for family in SLOWER if family not in device.without]
        for family in families:
            if _agrees(differs, frozenset({family})):
                return Verdict(fault, frozenset({family}), False)
        without = frozenset(families)
        if not _agrees(differs, without):
            return Verdict(fault, frozenset(), True)
        for family in reversed(families):
            if _agrees(differs, without - {family}):
                without -= {family}
        return Verdict(fault, without, False)


def _agrees(differs: Callable[[frozenset[Family]], str | None], without: frozenset[Family]) -> bool:
    try:
        return differs(without) is None
    except KernelError:  # of the slower road
        return False


def _difference(model: SmallModel, spec: ModelSpec, checkpoint: Checkpoint, device: DeviceProfile) -> str | None:
    chosen = ChosenDevice("cuda", device.torch_device.index or 0, device.name, device.capability)
    backend = CUDABackend(device=device, defers=True)
    try:
        backend.load(spec, checkpoint, resolve_config(spec, CONFIG, chosen, float32_weights=False))
        return difference(model, checkpoint, run_small_steps(backend, spec.vocab_size))
    except (StepError, RequestFailedError) as error:
        return str(error)
    finally:
        backend.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Small models are loaded without a line: the load of the user's own says what is refused."""
    log = logging.getLogger("realizar.backends.cuda")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
