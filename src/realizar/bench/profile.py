"""`realizar profile`: the times of the parts of one step, beside the bound that memory sets."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Backend, Capacity, ForwardInput, Step
from realizar.backends.inspection import InspectedBackend, ReadLimit
from realizar.backends.load_progress import LoadProgress
from realizar.backends.parts import PartTime
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.select import make_inspected_backend, resolve_model
from realizar.backends.step_values import StageValues
from realizar.batch import OpenedRow, StepRows
from realizar.bench.picture import bar, legend, svg, text
from realizar.bench.throughput import measure, right_drafts
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import Device, EngineConfig
from realizar.engine.loading import load_core
from realizar.errors import InvalidRequestError
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy

_GREEDY = SamplingParams(temperature=0.0)
_LEAST_STEPS_S = 0.5  # for which steps are timed, twice: long, so that some are undisturbed on a busy machine too
_CACHED = 1.05
_DRAFTED_TOKENS = 64  # of a row, generated to count drafts


@dataclass(frozen=True, slots=True)
class StepWork:
    """The step to look into: `batch` rows of `tokens` tokens each, after `context` tokens; `repeats` times over."""

    batch: int = 1
    tokens: int = 1
    context: int = 512
    repeats: int = 10


@dataclass(frozen=True, slots=True)
class PartProfile:
    """The operations of one part together. Fields are those of the JSON that `realizar profile --json` promises.

    Attributes:
        calls: operations in a step. ms: of all of them.
        share_of_step: of the step's wall clock.
        bytes_read: of weights and KV cache that it must read; 0 where it reads neither.
        gb_per_s: those bytes, 10^9, in that time; 0 without any.
        share_of_limit: of the rate at which as much as a step reads can be read; above 1 where caches hold more of it.
    """

    part: str
    calls: int
    ms: float
    share_of_step: float
    bytes_read: int
    gb_per_s: float
    share_of_limit: float


@dataclass(frozen=True, slots=True)
class DraftProfile:
    """Steps with as many drafts as there may be, behind a prompt of random tokens.

    Attributes:
        draft_tokens, accepted_tokens, acceptance, tokens_per_step: as of `BatchResult`.
        ms: of a step and the drafts that it brings.
    """

    draft_tokens: int
    accepted_tokens: int
    acceptance: tuple[float, ...]
    tokens_per_step: float
    ms: float


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A step taken apart.

    Attributes:
        parts: in the order of a step.
        sum_ms: of the parts. wall_ms: from one step's result to the next one's, in a run of steps.
        rest_ms: of a step beside its parts: what the host does for it, and what other programs took; 0 where parts
            that were timed alone take longer than a step, in which they overlap.
        limit_gb_per_s: at which this device was seen to read `limit_bytes` over and over (`ReadLimit`).
        drafts: None where none were asked for.
    """

    device: Device
    batch: int
    tokens: int
    context: int
    parts: tuple[PartProfile, ...]
    sum_ms: float
    wall_ms: float
    rest_ms: float
    limit_gb_per_s: float
    limit_bytes: int
    drafts: DraftProfile | None = None


def profile_step(
    checkpoint: Checkpoint,
    config: EngineConfig,
    work: StepWork,
    log: Callable[[str], None],
    progress: LoadProgress | None = None,
) -> StepProfile:
    """Load a model and take one of its steps apart. Keys and values of the context are whatever memory holds.

    `context_length`, `max_running` and `max_step_tokens` of `config` are set to what the step needs.

    Raises:
        UnsupportedModelError, CheckpointError, CapacityError: the weights can't be loaded.
        ContextLengthError: the model's context is shorter.
        InvalidRequestError: more rows than can be looked into at once.
    """
    with _loaded(checkpoint, config, work, progress) as (backend, resolved):
        step = one_step(backend.capacity(), work)
        log(f"timing steps of {work.batch * work.tokens} tokens")
        wall_s = time_steps(backend, step, work, resolved.steps_in_flight)
        log("timing each part alone")
        open_rows(backend, step)
        times = backend.time_parts(step, work.repeats)
        again_s = time_steps(backend, step, work, resolved.steps_in_flight)
        wall_s = min(wall_s, again_s)  # other programs come and go
        log("measuring how fast memory can be read")
        limit = backend.read_limit(sum(each.bytes_read for each in times))
    return summarise(resolved.chosen.kind, work, times, wall_s, limit)


def profile_drafts(
    checkpoint: Checkpoint,
    config: EngineConfig,
    work: StepWork,
    log: Callable[[str], None],
    progress: LoadProgress | None = None,
) -> DraftProfile:
    """Load a model with what drafts, and generate as many rows as the step has behind contexts as long.

    Errors are those of `measure_throughput`. Without a draft that was verified, numbers are those of steps without.
    """
    prompt = max(work.context, 1)
    length = prompt + _DRAFTED_TOKENS + 1
    needed = replace(config, context_length=length, typical_request_tokens=length, max_running=work.batch)
    core = load_core(checkpoint, needed, policy=Policy("prefill", measures_drafts=False), progress=progress)
    try:
        log(f"counting the drafts of {_DRAFTED_TOKENS} tokens")
        run = measure(core, batch=work.batch, prompt_tokens=prompt, gen_tokens=_DRAFTED_TOKENS)
    finally:
        core.close()
    drafts = run.drafts
    ms = 1e3 * run.decode_s / drafts.steps_of(_DRAFTED_TOKENS, work.batch)
    return DraftProfile(drafts.drafted, drafts.accepted, drafts.acceptance, drafts.tokens_per_step, ms)


@contextmanager
def _loaded(
    checkpoint: Checkpoint, config: EngineConfig, work: StepWork, progress: LoadProgress | None
) -> Iterator[tuple[InspectedBackend, ResolvedConfig]]:
    """A backend with the model, which has room for the step."""
    length, most = work.context + work.tokens, work.batch * work.tokens
    needed = replace(config, context_length=length, max_running=work.batch, max_step_tokens=most)
    if config.layers_on is not None:
        raise InvalidRequestError("a step is taken apart on one device, and with no layers_on", "layers_on")
    if config.tensor_parallel > 1:
        message = f"a step is taken apart in one process, and tensor_parallel is {config.tensor_parallel}"
        raise InvalidRequestError(message, "tensor_parallel")
    spec, resolved = resolve_model(checkpoint, needed)
    backend = make_inspected_backend(resolved.chosen, progress, (spec, checkpoint) if config.device_check else None)
    try:
        backend.load(spec, checkpoint, resolved)
        yield backend, resolved
    finally:
        backend.shutdown()


def one_step(capacity: Capacity, work: StepWork, token_ids: NDArray[np.int32] | None = None) -> ForwardInput:
    """The step: each row in blocks of its own, in order; where a window keeps few blocks they come round again.

    `token_ids` is int32 [tokens], row after row; None takes ids below 100.
    """
    length, size = work.context + work.tokens, capacity.block_size
    per_row = -(-length // size)
    places = np.tile(np.arange(work.context, length, dtype=np.int32), work.batch)
    of_row = np.repeat(np.arange(work.batch), work.tokens)
    slots, tables = [], []
    for count in capacity.num_blocks:
        table = (np.arange(work.batch * per_row, dtype=np.int32) % count).reshape(work.batch, per_row)
        tables.append(table)
        slots.append((table[of_row, places // size] * size + places % size).astype(np.int32))
    ids = np.arange(len(places), dtype=np.int32) % 100 if token_ids is None else token_ids
    numbers, none = np.arange(work.batch), np.zeros(work.batch, np.int32)
    starts = np.arange(work.batch + 1, dtype=np.int32) * np.int32(work.tokens)
    samples, computed = np.ones(work.batch, np.bool_), np.full(work.batch, work.context, np.int32)
    columns = StepRows(numbers, numbers, computed, ids, starts, samples, none, none)
    return ForwardInput(columns, places, tuple(slots), tuple(tables))


def summarise(
    device: Device, work: StepWork, times: Sequence[PartTime], wall_s: float, limit: ReadLimit
) -> StepProfile:
    """Operations of one name together, in the order in which the names first come."""
    parts = []
    for name in dict.fromkeys(each.part for each in times):
        same = [each for each in times if each.part == name]
        seconds, read = sum(each.seconds for each in same), sum(each.bytes_read for each in same)
        rate = read / seconds / 1e9 if seconds else 0.0
        parts.append(
            PartProfile(name, len(same), seconds * 1e3, seconds / wall_s, read, rate, rate / limit.gb_per_s)
        )  # fmt: skip
    total_ms = sum(part.ms for part in parts)
    wall_ms = wall_s * 1e3
    rest_ms = max(0.0, wall_ms - total_ms)
    step = (device, work.batch, work.tokens, work.context)
    return StepProfile(*step, tuple(parts), total_ms, wall_ms, rest_ms, limit.gb_per_s, limit.size_bytes)


def profile_table(profile: StepProfile) -> list[str]:
    lines = [
        f"{'part':<12} {'calls':>6} {'ms':>9} {'of step':>8} {'MB':>9} {'GB/s':>8} {'of limit':>9}",
    ]
    for part in profile.parts:
        line = f"{part.part:<12} {part.calls:>6} {part.ms:>9.3f} {part.share_of_step:>8.1%}"
        if part.bytes_read:
            line += f" {part.bytes_read / 1e6:>9.2f} {part.gb_per_s:>8.1f} {limit_label(part.share_of_limit):>9}"
        lines.append(line)
    read = sum(part.bytes_read for part in profile.parts)
    rate = read / profile.wall_ms / 1e6
    lines.append(f"{'rest':<12} {'':>6} {profile.rest_ms:>9.3f} {profile.rest_ms / profile.wall_ms:>8.1%}")
    lines.append(f"{'step':<12} {'':>6} {profile.wall_ms:>9.3f} {'100.0%':>8} {read / 1e6:>9.2f} {rate:>8.1f}"
                 f" {limit_label(rate / profile.limit_gb_per_s):>9}")  # fmt: skip
    return [*lines, coverage(profile), f"limit: {limit_line(profile)}", *_draft_lines(profile.drafts)]


def _draft_lines(drafts: DraftProfile | None) -> list[str]:
    if drafts is None:
        return []
    if not drafts.draft_tokens:
        return ["drafts: none were made"]
    right = right_drafts(drafts.draft_tokens, drafts.accepted_tokens, drafts.acceptance)
    return [f"drafts: {right}, {drafts.tokens_per_step:.2f} tokens of a step, {drafts.ms:.3f} ms a step with them"]


def limit_label(share: float) -> str:
    """A share of the read limit. What is read clearly faster comes from a cache."""
    return f"{share:.0%}" if share <= _CACHED else "in cache"


def limit_line(profile: StepProfile) -> str:
    return f"{profile.limit_bytes / 1e6:,.0f} MB, read over and over, come at {profile.limit_gb_per_s:.1f} GB/s"


def coverage(profile: StepProfile) -> str:
    share = f"the parts, each timed alone, take {profile.sum_ms:.3f} ms of a step's {profile.wall_ms:.3f} ms"
    if profile.sum_ms > profile.wall_ms:
        return f"{share}: they overlap in it"
    return f"{share}; the rest is the host's work between them, and other programs"


def open_rows(backend: Backend, step: ForwardInput) -> None:
    """Start the step's rows anew: none has sampled anything."""
    for row, count in zip(step.columns.numbers.tolist(), step.columns.num_context_tokens.tolist(), strict=True):
        backend.close(row)
        backend.open(OpenedRow(row, row, _GREEDY, (0,) * count, count, 0))


def time_steps(backend: Backend, step: ForwardInput, work: StepWork, in_flight: int) -> float:
    """Seconds from result to result, with as many steps on their way as the engine sends.

    It is the best of many single steps; of several in flight the median, as a late result makes the next look early.
    """
    open_rows(backend, step)
    backend.submit(step).result()
    waiting: list[Step] = []
    results_s: list[float] = []
    until_s = time.perf_counter() + _LEAST_STEPS_S
    while len(results_s) <= work.repeats or results_s[-1] < until_s:
        waiting.append(backend.submit(step))
        if len(waiting) == in_flight:
            waiting.pop(0).result()
            results_s.append(time.perf_counter())
    for left in waiting:
        left.result()
    apart_s = [after - before for before, after in itertools.pairwise(results_s)]
    return min(apart_s) if in_flight == 1 else statistics.median(apart_s)


# The values of the residual stream from layer to layer during a prompt, for `realizar trace`.


def trace_prompt(
    checkpoint: Checkpoint,
    config: EngineConfig,
    token_ids: Sequence[int],
    progress: LoadProgress | None = None,
) -> list[StageValues]:
    """Load a model, read a prompt, which is not empty, in one step, and describe the values at each stage.

    `config` and the errors of loading are as of `profile_step`.
    """
    work = StepWork(1, len(token_ids), 0)
    with _loaded(checkpoint, replace(config, graphs=False), work, progress) as (backend, _):
        return backend.stage_values(one_step(backend.capacity(), work, np.array(token_ids, np.int32)))


# The picture of a step: a bar per part, its dark end what reading its bytes alone would take.

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 760, 110, 200, 64, 24


def profile_svg(profile: StepProfile, title: str) -> str:
    """Parts in the order of a step and the rest of it, milliseconds from left to right."""
    longest = max(profile.rest_ms, *(part.ms for part in profile.parts)) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    below = _TOP + _ROW * len(profile.parts)
    parts = [
        text(12, 20, title, size=14, kind="bold"),
        *legend(12, 34, [("time in a step", "pale"), ("reading its bytes at the limit", "first")]),
    ]
    for index, part in enumerate(profile.parts):
        parts += _part(part, _TOP + _ROW * index, scale, profile.limit_gb_per_s)
    rest = f"{profile.rest_ms:.3f} ms, {profile.rest_ms / profile.wall_ms:.0%}"
    parts += _labelled("rest", rest, below, profile.rest_ms * scale, "grid")
    parts.append(text(12, below + _ROW + 20, coverage(profile), kind="muted", size=11))
    parts.append(text(12, below + _ROW + 36, f"limit: {limit_line(profile)}", kind="muted", size=11))
    return svg(_WIDTH, below + _ROW + 50, parts)


def _part(part: PartProfile, top: float, scale: float, limit_gb_per_s: float) -> list[str]:
    width = part.ms * scale
    bound = min(width, part.bytes_read / limit_gb_per_s / 1e6 * scale)
    label = f"{part.ms:.3f} ms, {part.share_of_step:.0%}"
    if part.bytes_read:
        share = limit_label(part.share_of_limit)
        label += f"; {share} of limit" if share.endswith("%") else f"; {share}"
    return [*_labelled(part.part, label, top, width, "pale"), bar(_LEFT, top + 3, bound, 16, "first")]


def _labelled(name: str, label: str, top: float, width: float, colour: str) -> list[str]:
    return [
        text(_LEFT - 8, top + 15, name, anchor="end"),
        bar(_LEFT, top + 3, width, 16, colour),
        text(_LEFT + width + 6, top + 15, label),
    ]
