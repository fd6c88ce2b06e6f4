"""`plan_cards` says what one, two and four GPUs of a kind have room for, and what their steps will cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realizar.backends.devices import ChosenDevice
from realizar.backends.memory_plan import MemoryPlan
from realizar.backends.select import plan_memory
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.draft_models import resolve_drafted
from realizar.engine.step_cost import StepCost, expert_parts, rates_of
from realizar.errors import InvalidRequestError, UnsupportedModelError

_COUNTS = (1, 2, 4)  # of GPUs, beside what is configured
TEXTS, TEXT_TOKENS, PROMPT_TOKENS = 64, 1024, 2048
"""Of steps whose cost is reckoned: rows, tokens before each, and tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class PlannedCards:
    """What GPUs that compute a model together do.

    Attributes:
        reason: why they can't; all else is then as of a model that does not fit.
        context_length: the longest that fits, 0 where none does. num_requests: of it, at once.
        one_text, texts, texts_together, prompt: tokens/s of a text alone, of 64, of 64 for each GPU, and of a prompt.
            None where the model or so many texts do not fit, where rates of the GPU, or of products in FP8, were not
            measured, and of a model whose steps are too short to be reckoned (`StepCost.is_reckoned`).
    """

    gpus: int
    reason: str | None = None
    context_length: int = 0
    num_requests: int = 0
    one_text: float | None = None
    texts: float | None = None
    texts_together: float | None = None
    prompt: float | None = None

    @property
    def fits(self) -> bool:
        return self.context_length > 0


def plan_cards(
    checkpoint: Checkpoint, config: EngineConfig, chosen: ChosenDevice, memory_bytes: int
) -> tuple[PlannedCards, ...]:
    """Of one, two, four and the configured number of GPUs like the chosen one, each with so many bytes, ascending."""
    counts = sorted({*_COUNTS, config.tensor_parallel})
    return tuple(_planned(checkpoint, config, chosen, memory_bytes, count) for count in counts)


def advise(cards: Sequence[PlannedCards], gpus: int) -> str | None:
    """What serves more than so many GPUs of those that were planned, or has room where these have not."""
    alone, own = cards[0], next(each for each in cards if each.gpus == gpus)
    if not own.fits:
        more = next((each.gpus for each in cards if each.fits and each.gpus > gpus), None)
        return None if more is None else f"{more} GPUs have room for the model together: --tensor-parallel {more}"
    if gpus == 1 or not alone.fits:
        return None
    room = "one of the GPUs has room for the model, and"
    if alone.one_text is None or own.one_text is None or alone.texts is None or own.texts_together is None:
        return f"{room} --replicas {gpus} answers more requests in the same time"
    replicas, together = gpus * alone.texts, own.texts_together
    if replicas <= together and alone.one_text < own.one_text:
        return None
    return (
        f"{room} --replicas {gpus} would write a text alone at {alone.one_text:,.0f} tokens/s, not {own.one_text:,.0f},"
        f" and {TEXTS * gpus} texts at {replicas:,.0f}, not {together:,.0f}"
    )


def _planned(
    checkpoint: Checkpoint, config: EngineConfig, chosen: ChosenDevice, memory_bytes: int, gpus: int
) -> PlannedCards:
    try:
        of_so_many = replace(config, tensor_parallel=gpus)
        spec, resolved, others, _ = resolve_drafted(checkpoint, of_so_many, chosen, memory_bytes)
        plan = plan_memory(spec, checkpoint, resolved, memory_bytes, others)
        parts = expert_parts(spec, checkpoint, gpus)
    except (InvalidRequestError, UnsupportedModelError) as error:
        return PlannedCards(gpus, str(error))
    rates, found = rates_of(chosen), PlannedCards(gpus, None, *_longest(plan))
    cost = None if rates is None else StepCost(spec, plan, rates, gpus, parts)
    if cost is None or not (cost.is_reckoned and found.fits):
        return found
    length = resolved.context_length
    texts = min(TEXT_TOKENS, length)
    at_once = next(each.num_requests for each in plan.contexts if each.context_length >= texts)
    at_once = min(at_once, resolved.max_running)
    prompt = min(PROMPT_TOKENS, length, resolved.max_step_tokens)
    return replace(
        found,
        one_text=1 / cost.decode_s(1, texts),
        texts=_rate(cost, TEXTS, texts, at_once),
        texts_together=_rate(cost, TEXTS * gpus, texts, at_once),
        prompt=None if resolved.prompt_dtype == "fp8" else prompt / cost.prompt_s(prompt),
    )


def _rate(cost: StepCost, rows: int, context: int, most: int) -> float | None:
    return rows / cost.decode_s(rows, context) if rows <= most else None


def _longest(plan: MemoryPlan) -> tuple[int, int]:
    """The longest context that fits, and how many requests of it; zeros where none does."""
    if plan.needed_bytes > plan.free_bytes:
        return 0, 0
    fitting = [(each.context_length, each.num_requests) for each in plan.contexts if each.num_requests]
    return fitting[-1] if fitting else (0, 0)
