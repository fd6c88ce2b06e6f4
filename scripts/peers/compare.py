"""Decode and prefill of realizar and its peers on the same files, in turn, in one run, beside the read limit."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.runs import Speeds, Workload, run_ik, run_llamacpp, run_realizar
from peers.tools import PeerTools
from realizar.backends.bandwidth import read_bandwidth
from realizar.backends.machine import Machine, read_machine
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import CapacityError
from realizar.models.parameters import size_of_token
from realizar.models.registry import build_spec

OURS = "realizar"
LLAMACPP = "llama.cpp"
IK = "ik_llama.cpp"
IK_REPACKED = "ik_llama.cpp, repacked"

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PeerModel:
    """A file to measure.

    Attributes:
        size_bytes: of the file, without the experts that a token does not go through; the share of the read limit
            counts it.
    """

    name: str
    path: Path
    size_bytes: int


def read_model(name: str, path: Path) -> PeerModel:
    """A model to measure.

    Raises:
        CheckpointError, UnsupportedModelError: if the file is no model that realizar runs.
    """
    checkpoint = open_checkpoint(path)
    spec = build_spec(checkpoint)
    tensors = WeightTensors(spec, checkpoint)
    sizes = {
        each.weight: tensors.size_bytes(each.weight) for _, one in spec.mixtures() for each in one.expert_linears()
    }
    return PeerModel(name, path, path.stat().st_size - sum(sizes.values()) + size_of_token(spec, sizes))


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens/s by program, medians over all rounds, of one model at one number of threads.

    A program that failed is absent.
    """

    model: str
    size_bytes: int
    threads: int
    limit_gb_per_s: float
    prefill: dict[str, float]
    decode: dict[str, float]

    def ratio(self, phase: dict[str, float], peer: str) -> float | None:
        """Our speed over a peer's."""
        return phase[OURS] / phase[peer] if OURS in phase and peer in phase else None

    def best_ik(self, phase: dict[str, float]) -> float | None:
        """Our speed over ik_llama.cpp's better variant."""
        ratios = [ratio for peer in (IK, IK_REPACKED) if (ratio := self.ratio(phase, peer)) is not None]
        return min(ratios, default=None)

    def achieved_gb_per_s(self, program: str) -> float | None:
        """Decode speed times the bytes that a token needs: what the program would have to read."""
        return self.decode[program] * self.size_bytes / 1e9 if program in self.decode else None

    def share_of_limit(self) -> float | None:
        """Our achieved bandwidth over the read limit."""
        achieved = self.achieved_gb_per_s(OURS)
        return None if achieved is None else achieved / self.limit_gb_per_s


@dataclass(frozen=True, slots=True)
class PeerResults:
    """A whole run."""

    machine: Machine
    work: Workload
    rounds: int
    rows: tuple[Row, ...]
    failures: tuple[str, ...] = field(default=())


def compare(
    tools: PeerTools, models: Sequence[PeerModel], threads: Sequence[int], work: Workload, rounds: int, log: Log
) -> PeerResults:
    """Measure every model at every number of threads.

    In each round every program runs once, one after the other, so that a slow minute of the machine meets all of them.

    Args:
        log: callback for progress messages.
    """
    failures: list[str] = []
    rows = []
    for count in threads:
        log(f"read limit, {count} threads")
        limit = read_bandwidth(count)
        rows += [_row(tools, model, count, limit, work, rounds, failures, log) for model in models]
    return PeerResults(read_machine(), work, rounds, tuple(rows), tuple(failures))


def _row(
    tools: PeerTools,
    model: PeerModel,
    threads: int,
    limit: float,
    work: Workload,
    rounds: int,
    failures: list[str],
    log: Log,
) -> Row:
    programs: dict[str, Callable[[], Speeds]] = {
        LLAMACPP: lambda: run_llamacpp(tools, model.path, threads, work),
        OURS: lambda: run_realizar(model.path, threads, work),
    }
    python = tools.ik_python
    if python is not None:
        programs[IK] = lambda: run_ik(python, model.path, threads, work, repack=False)
        programs[IK_REPACKED] = lambda: run_ik(python, model.path, threads, work, repack=True)
    samples: dict[str, list[Speeds]] = {}
    for number in range(1, rounds + 1):
        for program, run in list(programs.items()):
            log(f"{model.name}, {threads} threads, round {number}: {program}")
            try:
                speeds = run()
                samples.setdefault(program, []).append(speeds)
            except CapacityError as error:
                failures.append(f"{model.name}, {threads} threads, {program}: {error}")
                del programs[program]
    decode = {name: statistics.median(speeds.decode for speeds in runs) for name, runs in samples.items()}
    prefill = {name: statistics.median(speeds.prefill for speeds in runs) for name, runs in samples.items()}
    return Row(model.name, model.size_bytes, threads, limit, prefill, decode)
