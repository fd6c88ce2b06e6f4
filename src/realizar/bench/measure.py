"""`measure` times prefill and decode of a loaded engine, with token ids only."""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass, replace

from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CapacityError, InvalidRequestError
from realizar.models.spec import ModelSpec
from realizar.request import Request
from realizar.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """One run: `batch` rows read `prompt_tokens` each from nothing, then decode `gen_tokens` each after them.

    Attributes:
        prefill_s: until every row has its first token.
        decode_s: the `gen_tokens` steps after that.
        experts_read: experts that a mixture read in one of these, on average; None without any, or if the backend does
            not count.
    """

    batch: int
    prompt_tokens: int
    gen_tokens: int
    prefill_s: float
    decode_s: float
    experts_read: float | None = None

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
    rows with texts of their own. So rows of a mixture get random tokens, but for a row alone, which reads as many
    experts whatever its token is.
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
        ContextLengthError: prompt and output exceed the context.
        CapacityError: the rows do not fit at once.
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
    preemptions = core.counts.preemptions
    read: set[str] = set()
    read_s = started_s = time.perf_counter()
    while core.has_work:
        outputs = core.step()
        if len(read) < batch:
            names = {output.request_id for output in outputs}
            if names & read:
                break
            read |= names
            core.forget_experts_read()  # those of the prompts
            read_s = time.perf_counter()
    if len(read) < batch or core.counts.preemptions > preemptions:
        raise CapacityError(f"{batch} rows of {prompt_tokens + gen_tokens} tokens do not fit into memory at once")
    decode_s = time.perf_counter() - read_s
    return PhaseTimes(batch, prompt_tokens, gen_tokens, read_s - started_s, decode_s, core.experts_read())
