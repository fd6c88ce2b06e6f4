"""Times the host's share of a step of decodes: engine and scheduler, and what the GPU backend does before it launches.

No GPU is needed: each step is answered at once, with the same token for every row. Times are processor time of the
thread that drives the engine, the median over the steps of all rows, since other programs come and go.

    python scripts/time_host.py 1 16 64 256
    python scripts/time_host.py 64 --drafts 4
    python scripts/time_host.py 64 --logprobs 5
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence as ListOf
from functools import partial

import numpy as np
import torch
from cuda_bench import random_checkpoint
from numpy.typing import NDArray

from realizar.backends.base import Capacity, ForwardInput
from realizar.backends.cuda.device import interpreter_device
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.sampling.logprobs import PendingLogprobs
from realizar.backends.cuda.sampling.results import NOT_REACHED, PendingResult, TakeIn
from realizar.backends.cuda.sampling.step_sampler import RowLogprobs
from realizar.backends.cuda.shapes import padded_rows, step_sizes
from realizar.backends.cuda.step import CUDAStep, wanted_tokens
from realizar.backends.cuda.step_arrays import StepArrays, count_decodes, tiles_of
from realizar.backends.devices import ChosenDevice
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.select import resolve_model
from realizar.batch import OpenedRow
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.models.spec import ModelSpec
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from realizar.scheduler.row_table import Sequence
from realizar.stop_rule import StopRule

PROMPT, STEPS, TILE = 128, 128, 64
RIGHT, WRONG = 7, 8  # a draft that is sampled, and the token where it is not


class Drafts:
    """A drafter of as many drafts for each sequence as it has room for."""

    awaits_results = True

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(self, sequences: ListOf[Sequence]) -> list[tuple[int, ...]]:
        return [(RIGHT,) * min(self._count, sequence.max_drafts) for sequence in sequences]

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


class AtOnce:
    """A backend that fills a step's arrays as the GPU's does, and computes nothing."""

    def __init__(self, spec: ModelSpec, config: ResolvedConfig, logprobs: int | None) -> None:
        self._logprobs = logprobs
        self._config, self._sizes = config, step_sizes(spec, config, TILE)
        self._arrays = StepArrays(self._sizes, interpreter_device())
        self._pending: CUDAStep | None = None
        self._stop_rule = StopRule(config.max_running)

    def load(self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: object = None) -> None:
        raise NotImplementedError("it is made loaded")

    def device_memory(self) -> None:
        """It has none of its own."""

    def capacity(self) -> Capacity:
        config, size = self._config, self._config.block_size
        blocks = config.max_running * (PROMPT + STEPS + size) // size + 1
        return Capacity(
            block_size=size, num_blocks=(blocks,), weight_bytes=1, weight_bytes_per_token=1, kv_cache_bytes=1,
            kv_cache_dtype="bf16", load_s=0.0,
        )  # fmt: skip

    def open(self, opened: OpenedRow) -> None:
        pass

    def close(self, row: int) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def submit(self, step: ForwardInput) -> CUDAStep:
        if self._pending is not None:
            self._pending.start_sampling()
        wanted, tiles = wanted_tokens(step), len(tiles_of(step, TILE))
        decodes = padded_rows(count_decodes(step), self._sizes.rows)
        kind = StepKind(len(step.columns.token_ids) if tiles else decodes, decodes, tiles)
        if step.columns.only_decodes:
            self._arrays.send(step, kind, step.columns.starts[:-1], step.columns.numbers)
        else:
            self._arrays.send(step, kind, wanted.tokens, step.columns.numbers[wanted.rows])
        answer = partial(_answer, logprobs=self._logprobs, take_in=self._take_in)
        self._pending = CUDAStep(step, wanted, answer, torch.device("cpu"))
        return self._pending

    def _take_in(
        self, numbers: NDArray[np.intp], sampled: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        return self._stop_rule.kept(numbers, sampled, np.zeros_like(sampled) + np.arange(sampled.shape[1]))


def _answer(step: CUDAStep, logprobs: int | None, take_in: TakeIn) -> PendingResult:
    """The same token for each row, and as many ids in its list; of a row's drafts the first half is right."""
    wanted = step.wanted
    found: list[RowLogprobs] = []
    if logprobs is not None:
        lines = torch.arange(wanted.num_sampled * (3 + 2 * logprobs), dtype=torch.float64)
        pending = PendingLogprobs([logprobs] * wanted.num_sampled, lines.reshape(wanted.num_sampled, -1))
        found.append((np.arange(wanted.num_sampled), pending))
    if not wanted.num_drafts:
        all_right = torch.full((wanted.num_sampled, 1), RIGHT, dtype=torch.int32)
        return PendingResult(all_right, all_right, found, {}, take_in)
    right = (step.forward_input.columns.num_drafts[wanted.sampled_rows] // 2)[:, None]
    places = np.arange(1 + wanted.num_drafts)
    made = np.where(places < right, RIGHT, np.where(places == right, WRONG, NOT_REACHED))
    sampled = torch.from_numpy(made.astype(np.int32))
    return PendingResult(sampled, sampled, found, {}, take_in)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the host's share of a step of decodes; needs no GPU.")
    parser.add_argument("rows", type=int, nargs="*", default=[256], help="sequences that decode together (default 256)")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each, half of which are right (default 0)")
    parser.add_argument("--logprobs", type=int, help="most probable ids that each token lists; without it none")
    given = parser.parse_args()
    for rows in given.rows:
        found = [
            step_s(rows, given.drafts, given.logprobs, prefix_cache=prefix_cache) for prefix_cache in (False, True)
        ]
        plain, cached = (f"{1e3 * seconds:.3f}" for seconds in found)
        print(f"{rows} rows: {plain} ms of the host's a step, {cached} with the prefix cache", flush=True)
    return 0


def step_s(rows: int, drafts: int, logprobs: int | None, *, prefix_cache: bool) -> float:
    """Processor seconds of a step in which `rows` rows decode, with stop ids; the median of all such steps."""
    config = EngineConfig(
        max_running=rows, max_step_tokens=2048, context_length=PROMPT + STEPS + 1, prefix_cache=prefix_cache,
        speculative_tokens=drafts,
    )  # fmt: skip
    spec, resolved = resolve_model(random_checkpoint("tiny", "q8_0"), config, ChosenDevice("cuda"))
    drafter = Drafts(drafts) if drafts else None
    core = EngineCore(AtOnce(spec, resolved, logprobs), spec, resolved, policy=Policy("prefill"), drafter=drafter)
    rng, sampling = random.Random(rows), SamplingParams(temperature=0.0, stop_token_ids=(1, 2, 3), logprobs=logprobs)
    for row in range(rows):
        prompt = tuple(rng.randrange(spec.vocab_size) for _ in range(PROMPT))
        core.add(Request(str(row), prompt, sampling, STEPS))
    times_s: list[float] = []
    while core.has_work:
        started_s = time.thread_time()
        if len(core.step().number_list()) == rows:
            times_s.append(time.thread_time() - started_s)
    core.close()
    return statistics.median(times_s)


if __name__ == "__main__":
    sys.exit(main())
