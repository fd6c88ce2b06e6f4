"""Verdicts made and heeded: a GPU without the kernels that it gets wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from realizar.backends.cuda.device import SLOWER, DeviceProfile, Family
from realizar.backends.load_progress import LoadProgress
from realizar.backends.verdict.compare import NoComparisonError
from realizar.backends.verdict.judge import Verdict, judge
from realizar.backends.verdict.kept import keep_verdicts, known_verdicts
from realizar.backends.verdict.small_models import SMALL_MODELS, SmallModel
from realizar.errors import CapacityError, KernelError

_LOG = logging.getLogger(__name__)


def trusted(device: DeviceProfile, label: str, models: Sequence[SmallModel], progress: LoadProgress) -> DeviceProfile:
    """A GPU without the families of kernels by which it differs from the CPU, which a warning names.

    `models` are to compare it by, where no verdict is kept.

    Raises:
        KernelError: it differs, whatever is given up; or as of `judge`.
        DeviceLostError: as of `judge`.
    """
    verdicts = known_verdicts(device)
    fault: str | None = None
    without: frozenset[Family] = frozenset()
    for done, model in enumerate(models):
        verdict = verdicts.get(str(model))
        if verdict is None:
            progress("comparing the GPU with the CPU", done / len(models))
            try:
                verdict = _judge(model, replace(device, without=device.without | without), label)
            except (CapacityError, NoComparisonError) as error:
                _LOG.warning("the GPU is not compared with the CPU: %s", error)
                break
            verdicts[str(model)] = verdict
            keep_verdicts(device, verdicts)
        _check_hope(verdict, label)
        fault, without = fault or verdict.fault, without | verdict.without
    if without:
        _LOG.warning("%s", _explained(label, fault, without))
    return replace(device, without=device.without | without)


def is_known(device: DeviceProfile, models: Sequence[SmallModel]) -> bool:
    """True if `trusted` finds all verdicts kept."""
    verdicts = known_verdicts(device)
    return all(str(model) in verdicts for model in models)


def known_faults(device: DeviceProfile, models: Sequence[SmallModel]) -> frozenset[Family]:
    """Families that `trusted` gives up by the verdicts that are kept; nothing is compared."""
    verdicts = known_verdicts(device)
    return frozenset().union(*(verdicts[str(model)].without for model in models if str(model) in verdicts))


def compared_anew(device: DeviceProfile, label: str) -> str | None:
    """Compare a GPU by all small models, and keep the verdicts; raises as `trusted` and `judge` do.

    Returns None, or where it differs and what takes the place of its kernels.
    """
    verdicts = {str(model): _judge(model, device, label) for model in SMALL_MODELS}
    keep_verdicts(device, verdicts)
    for verdict in verdicts.values():
        _check_hope(verdict, label)
    wrong = [verdict for verdict in verdicts.values() if verdict.fault is not None]
    return _explained(label, wrong[0].fault, frozenset().union(*(each.without for each in wrong))) if wrong else None


def _judge(model: SmallModel, device: DeviceProfile, label: str) -> Verdict:
    start_s = time.perf_counter()
    verdict = judge(model, device)
    _LOG.info("compared %s with the CPU by %s in %.1f s", label, model, time.perf_counter() - start_s)
    return verdict


def _check_hope(verdict: Verdict, label: str) -> None:
    if verdict.hopeless:
        raise KernelError(
            f"{label} does not compute what the CPU does, whichever kernels it goes without: {verdict.fault}"
            " (`realizar doctor` compares again, `--device cpu` runs without it)"
        )


def _explained(label: str, fault: str | None, families: frozenset[Family]) -> str:
    named = [family for family in SLOWER if family in families]
    return (
        f"{label} does not compute what the CPU does with kernels of {', '.join(named)} ({fault});"
        f" {', '.join(SLOWER[family] for family in named)}"
    )
