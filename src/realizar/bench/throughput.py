"""`realizar bench`: prefill and decode of one model at several batch sizes, several times each."""

from __future__ import annotations

import math
import random
import resource
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise

from realizar.backends.load_progress import LoadProgress
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import load_core
from realizar.errors import CapacityError, InvalidRequestError
from realizar.models.spec import Experts, ModelSpec
from realizar.outputs import added_by_place
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from realizar.scheduler.row_table import Sequence

_WARM_PROMPT_TOKENS, _WARM_GEN_TOKENS = 64, 4
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens per second over the repeats."""

    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch size. Fields are those of the JSON that `realizar bench --json` promises.

    Attributes:
        prefill_tokens_per_s, decode_tokens_per_s: of all rows together.
        load_s: seconds that packing the weights took.
        peak_memory_bytes: largest resident size of the process so far, of several the first.
        device_memory_bytes: of a GPU's memory, what all programs used in the end; 0 on the CPU.
        weight_bytes_per_token: packed bytes that one token reads: of experts those that it goes through.
        achieved_gb_per_s: those bytes times decode steps per second, in 10^9 bytes; less than is read where several
            rows go through different experts.
        experts_read: experts that a mixture read in a decode, on average; None without any, or if the device does not
            count.
        experts_by_chance: those that it would read if tokens chose by chance; None without any.
        tokens_per_step: of a row and a step with drafts, on average; None if no draft was verified.
        draft_tokens, accepted_tokens: verified, and those of them that were right; of all repeats.
        acceptance: shares of the steps with drafts in which so many, 1 and on, were right at least.
    """

    batch: int
    prefill_tokens_per_s: Spread
    decode_tokens_per_s: Spread
    load_s: float
    peak_memory_bytes: int
    device_memory_bytes: int
    weight_bytes_per_token: int
    achieved_gb_per_s: float
    experts_read: float | None
    experts_by_chance: float | None
    tokens_per_step: float | None
    draft_tokens: int
    accepted_tokens: int
    acceptance: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """The work to time: P prompt tokens, then G generated tokens, `repeats` times for each number of rows.

    `acceptance` has the shares of steps in which so many drafts, 1 and on, are right at least: `DrawnDrafts`. None
    leaves drafts as they are.
    """

    prompt_tokens: int
    gen_tokens: int
    batches: tuple[int, ...]
    repeats: int
    acceptance: tuple[float, ...] | None = None


def measure_throughput(
    checkpoint: Checkpoint,
    config: EngineConfig,
    work: Work,
    log: Callable[[str], None],
    progress: LoadProgress | None = None,
) -> list[BatchResult]:
    """Load the weights and time the work, which sets the context, the typical tokens, rows and step tokens of `config`.

    Raises:
        UnsupportedModelError, CheckpointError, CapacityError: the weights can't be loaded.
        InvalidRequestError: a number out of range, or a context that the model does not have.
    """
    most, context = max(work.batches), work.prompt_tokens + work.gen_tokens + 1
    needed = replace(
        config,
        context_length=context,
        typical_request_tokens=context,
        max_running=most,
        max_step_tokens=None if config.max_step_tokens is None else max(config.max_step_tokens, most),
    )
    drafter = None
    if work.acceptance is not None:
        drafter, needed = DrawnDrafts(work.acceptance), replace(needed, speculative_tokens=len(work.acceptance))
    policy = Policy("prefill", measures_drafts=drafter is None)
    core = load_core(checkpoint, needed, policy=policy, progress=progress, drafter=drafter)
    try:
        return [measure_batch(core, batch, work, log, drafter) for batch in work.batches]
    finally:
        core.close()


class DrawnDrafts:
    """Drafts that are right at drawn rates, in place of those that a model or a block of random weights proposes.

    Texts are what they are without it: it has seen them, in a run of the same requests while it `learns`. A row's draws
    are spread evenly, so that a few dozen steps have the rates already, and are the same whenever a program makes them.
    The rows must be sampled almost without regard to their logits (`RANDOM`): then no difference between two runs' sums
    changes what follows.

    Args:
        rates: share of steps in which so many drafts, 1 and on, are right at least: above 0, and none above the one
            before it. InvalidRequestError if they are not.
    """

    def __init__(self, rates: ListOf[float]) -> None:
        if not rates or not all(1 >= one >= other > 0 for one, other in pairwise((1.0, *rates))):
            given = ",".join(f"{rate:g}" for rate in rates)
            raise InvalidRequestError(
                f"acceptance must be shares that fall, such as 0.8,0.67, not {given!r}", "acceptance"
            )
        self.awaits_results, self.learns = True, True
        self._rates, self._texts = rates, dict[str, list[int]]()
        self._drawn: dict[str, float] = {}

    def propose(self, sequences: ListOf[Sequence]) -> list[tuple[int, ...]]:
        return [self._drafts(each) for each in sequences]

    def _drafts(self, sequence: Sequence) -> tuple[int, ...]:
        name, at = sequence.request.request_id, len(sequence.token_ids)
        if self.learns:
            self._texts[name] = sequence.token_ids.tolist()
            return ()
        drafts, drawn = self._texts[name][at : at + len(self._rates)], self._draw(name)
        right = sum(rate > drawn for rate in self._rates)
        return (*drafts[:right], *(token_id ^ 1 for token_id in drafts[right:]))

    def _draw(self, name: str) -> float:
        """The next number of a row from 0 to 1, each so far from all before it as the golden ratio has them lie."""
        drawn = self._drawn.get(name)
        self._drawn[name] = random.Random(name).random() if drawn is None else (drawn + _GOLDEN) % 1
        return self._drawn[name]

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What is right was drawn."""

    def forget(self, sequence_id: int) -> None:
        """Texts are found by names, which other runs use again."""


def measure_batch(
    core: EngineCore, batch: int, work: Work, log: Callable[[str], None], drafter: DrawnDrafts | None
) -> BatchResult:
    """Time one number of rows, the work's drafts drawn by `drafter`, if there is one: that of the core."""
    if drafter is not None:
        drafter.learns = True
    log(f"batch {batch}: warming up")
    warm_prompt_tokens = min(work.prompt_tokens, _WARM_PROMPT_TOKENS)
    measure(core, batch=batch, prompt_tokens=warm_prompt_tokens, gen_tokens=min(work.gen_tokens, _WARM_GEN_TOKENS))
    of_work = partial(measure, core, batch=batch, prompt_tokens=work.prompt_tokens, gen_tokens=work.gen_tokens)
    if drafter is not None:
        log(f"batch {batch}: learning the texts that drafts are drawn from")
        of_work = partial(of_work, sampling=RANDOM)
        of_work()
        drafter.learns = False
    runs: list[PhaseTimes] = []
    for repeat in range(work.repeats):
        log(f"batch {batch}: run {repeat + 1} of {work.repeats}")
        runs.append(of_work(seed=0 if drafter is not None else repeat))
    drafts = reduce(DraftedSteps.plus, (run.drafts for run in runs))
    decode = _spread([run.decode_tokens_per_s for run in runs])
    capacity, share = core.capacity, drafts.steps_of(work.gen_tokens, batch * work.repeats) / work.gen_tokens
    return BatchResult(
        batch=batch,
        prefill_tokens_per_s=_spread([run.prefill_tokens_per_s for run in runs]),
        decode_tokens_per_s=decode,
        load_s=capacity.load_s,
        peak_memory_bytes=peak_memory_bytes(),
        device_memory_bytes=0 if core.device_memory is None else core.device_memory.used_bytes,
        weight_bytes_per_token=capacity.weight_bytes_per_token,
        achieved_gb_per_s=decode.median / batch * share * capacity.weight_bytes_per_token / 1e9,
        experts_read=_mean([run.experts_read for run in runs if run.experts_read is not None]),
        experts_by_chance=_mean([by_chance(experts, batch) for _, experts in core.spec.mixtures()]),
        tokens_per_step=drafts.tokens_per_step if drafts.steps else None,
        draft_tokens=drafts.drafted,
        accepted_tokens=drafts.accepted,
        acceptance=drafts.acceptance,
    )


def _mean(values: ListOf[float]) -> float | None:
    return statistics.fmean(values) if values else None


def by_chance(experts: Experts, batch: int) -> float:
    """Experts that at least one of `batch` tokens chooses if all choices are as likely."""
    return experts.num_experts * (1 - (1 - experts.experts_per_token / experts.num_experts) ** batch)


def _spread(values: ListOf[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in kilobytes


# `measure` times prefill and decode of a loaded engine, with token ids only.


@dataclass(frozen=True, slots=True)
class DraftedSteps:
    """What was drafted in some steps.

    Attributes:
        steps: times that drafts of a row were verified. drafted: these drafts. by_place: those of them that were right,
            the first of a step, the second, and so on.
    """

    steps: int = 0
    drafted: int = 0
    by_place: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        return sum(self.by_place)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """`BatchResult`."""
        return tuple(count / max(self.steps, 1) for count in self.by_place)

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.acceptance)

    def steps_of(self, tokens: int, rows: int) -> float:
        """Steps in which so many rows decoded so many tokens each, on average: also those without drafts."""
        return max(tokens - self.accepted / rows, 1.0)

    def plus(self, other: DraftedSteps) -> DraftedSteps:
        places = added_by_place(self.by_place, other.by_place)
        return DraftedSteps(self.steps + other.steps, self.drafted + other.drafted, places)

    def since(self, earlier: DraftedSteps) -> DraftedSteps:
        """Those of a count that goes on, behind what it had before."""
        before = (*earlier.by_place, *(0 for _ in self.by_place[len(earlier.by_place) :]))
        places = tuple(now - then for now, then in zip(self.by_place, before, strict=True))
        return DraftedSteps(self.steps - earlier.steps, self.drafted - earlier.drafted, places)


def right_drafts(drafted: int, accepted: int, acceptance: ListOf[float]) -> str:
    """How many drafts were right, and the shares of steps in which so many were."""
    places = ", ".join(f"{share:.2f}" for share in acceptance)
    return f"{accepted} of {drafted} drafts right" + (f" (by place {places})" if places else "")


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One run: `batch` rows read `prompt_tokens` each from nothing, then decode `gen_tokens` each after them.

    `prefill_s` is until every row has its first token, `decode_s` of the steps after, `drafts` of all. `experts_read`:
    `BatchResult`.
    """

    batch: int
    prompt_tokens: int
    gen_tokens: int
    prefill_s: float
    decode_s: float
    experts_read: float | None = None
    drafts: DraftedSteps = DraftedSteps()

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.batch * self.prompt_tokens / self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """0 when nothing was to be decoded."""
        return self.batch * self.gen_tokens / self.decode_s if self.gen_tokens else 0.0


GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=100.0)
"""The highest temperature: ids of the vocabulary are nearly as likely."""


def next_tokens(spec: ModelSpec, batch: int) -> SamplingParams:
    """The sampling of rows where speed alone is asked for.

    Greedy rows of random weights come to repeat tokens, and rows with the same token read the same experts: fewer than
    rows with texts of their own. So rows of a mixture get random tokens, but for a row alone.
    """
    return RANDOM if batch > 1 and spec.mixtures() else GREEDY


def measure(
    core: EngineCore, *, batch: int, prompt_tokens: int, gen_tokens: int, seed: int = 0,
    sampling: SamplingParams | None = None,
) -> PhaseTimes:  # fmt: skip
    """Time the two phases apart; `core` is idle and was made with `Policy("prefill")`.

    Args:
        seed: of the prompts' tokens and, with each row's number, of its choices.
        sampling: of all rows; None takes that of `next_tokens`.

    Raises:
        InvalidRequestError: `batch` or `prompt_tokens` below 1, or `gen_tokens` below 0.
        ContextLengthError, CapacityError: prompt and output exceed the context; the rows do not fit at once.
    """
    for name, value, least in (("batch", batch, 1), ("prompt_tokens", prompt_tokens, 1), ("gen_tokens", gen_tokens, 0)):
        if value < least:
            raise InvalidRequestError(f"{name} must be at least {least}, not {value}", name)
    rng, chosen_by = random.Random(seed), sampling or next_tokens(core.spec, batch)
    names = [f"row {row}" for row in range(batch)]
    salt = secrets.token_hex(16)  # no run finds what another has computed
    try:
        for row, name in enumerate(names):
            prompt = tuple(rng.randrange(core.spec.vocab_size) for _ in range(prompt_tokens))
            own = replace(chosen_by, seed=seed * batch + row)
            core.add(Request(name, prompt, own, max_tokens=gen_tokens + 1, cache_salt=salt))
        return _run(core, batch, prompt_tokens, gen_tokens)
    finally:
        for name in names:
            core.abort(name)


def _run(core: EngineCore, batch: int, prompt_tokens: int, gen_tokens: int) -> PhaseTimes:
    before, drafted_before = core.scheduler.counts, _drafted(core)
    read: set[int] = set()
    read_s = started_s = time.perf_counter()
    while core.has_work:
        numbers = set(core.step().number_list())
        if len(read) < batch:
            if numbers & read:
                break
            read |= numbers
            core.forget_experts_read()  # those of the prompts
            read_s = time.perf_counter()
    after = core.scheduler.counts
    if len(read) < batch or after.num_preemptions > before.num_preemptions:
        raise CapacityError(f"{batch} rows of {prompt_tokens + gen_tokens} tokens do not fit into memory at once")
    decode_s = time.perf_counter() - read_s
    drafts = _drafted(core).since(drafted_before)
    return PhaseTimes(batch, prompt_tokens, gen_tokens, read_s - started_s, decode_s, core.experts_read(), drafts)


def _drafted(core: EngineCore) -> DraftedSteps:
    counts = core.scheduler.counts
    return DraftedSteps(counts.num_drafts, counts.draft_tokens, tuple(counts.accepted_by_place))
