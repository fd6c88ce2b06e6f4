"""The requests of a mix: what each asks, how long it is, when its client leaves. Each is drawn by its number from one
seed, so that any process can draw any of them, and two servers get the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from realizar.bench.mix.dialects import Dialect, make_body
from realizar.bench.mix.kinds import KINDS, NEUTRAL, find_kind
from realizar.bench.mix.lengths import TRACE_ANSWERS, TRACE_PROMPTS, LengthSource
from realizar.bench.serve_client import Call
from realizar.bench.serve_workload import any_words
from realizar.errors import InvalidRequestError

_TOKENS_A_WORD = 1.3  # at the most, in the vocabularies of today's models
_TEMPLATE_TOKENS = 64  # of a chat, and of a prompt's first token
_EARLY = 0.2  # of those who leave: they do so before the first token, or soon after
_EARLY_S = 2.0


@dataclass(frozen=True, slots=True)
class MixWork:
    """A load of mixed kinds.

    Attributes:
        weights: how often each kind is drawn.
        num_requests: after which the load ends; None where `seconds` says when.
        seconds: after which no request is begun, and nothing is counted any more.
        prompt_words, output_tokens: lengths of a prompt and of an answer.
        rate_per_s: mean rate of arrivals, at random times (Poisson); None where `concurrency` says when.
        concurrency: clients, each of which sends its next request when one ends.
        leave_share: of the clients that leave before their answer is complete.
        context_tokens: of the server, where it is known: longer requests are shortened to it.
        shared_words: words that all prompts start with, besides their own.
        ignore_eos: ask for answers of full length.
        chat: send all kinds as chats.
        seed, salt: of everything drawn.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {kind.name: kind.weight for kind in KINDS.values()})
    num_requests: int | None = None
    seconds: float | None = None
    prompt_words: LengthSource = TRACE_PROMPTS
    output_tokens: LengthSource = TRACE_ANSWERS
    rate_per_s: float | None = None
    concurrency: int | None = None
    leave_share: float = 0.0
    context_tokens: int | None = None
    shared_words: int = 0
    ignore_eos: bool = True
    chat: bool = False
    seed: int = 0
    salt: str = ""

    def __post_init__(self) -> None:
        for name in self.weights:
            find_kind(name, "kind")
        if not any(self.weights.values()):
            raise InvalidRequestError("no kind of request has a weight above 0", "kind")
        if (self.num_requests is None) == (self.seconds is None):
            raise InvalidRequestError("give either a number of requests or seconds", "requests")
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise InvalidRequestError("give either a rate of arrivals or a number of requests open at a time", "rate")
        if not 0 <= self.leave_share <= 1:
            raise InvalidRequestError(f"leave must be between 0 and 1, not {self.leave_share:g}", "leave")
        for name, value in (
            ("rate", self.rate_per_s), ("seconds", self.seconds), ("concurrency", self.concurrency),
            ("requests", self.num_requests),
        ):  # fmt: skip
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequestError(f"{name} must be above 0, not {value:g}", name)
        if self.shared_words < 0:
            raise InvalidRequestError(f"shared_words must be at least 0, not {self.shared_words}", "shared_words")


@dataclass(frozen=True, slots=True)
class MixRequest:
    """One request.

    Attributes:
        kind: its name.
        call: what is sent.
        num_words: of the prompt.
        max_tokens: of the answer.
        was_shortened: it would not have fitted into the context.
    """

    kind: str
    call: Call
    num_words: int
    max_tokens: int
    was_shortened: bool = False


def draw_request(work: MixWork, number: int, dialect: Dialect, model: str) -> MixRequest:
    """The request of that number.

    Raises:
        UnknownFieldsError: the server does not know a field of its kind.
    """
    rng = random.Random(f"{work.seed}/{work.salt}/{number}")
    kind = find_kind(rng.choices(list(work.weights), weights=list(work.weights.values()))[0], "kind")
    words, tokens = work.prompt_words.draw(rng), work.output_tokens.draw(rng)
    fitting_words, tokens = _fitting(work, words, tokens)
    leave_deltas, leave_s = _disconnect_of(work, rng, tokens)
    shared = any_words(random.Random(work.seed), work.shared_words)
    prompt = " ".join([*shared, *any_words(rng, fitting_words)])
    fields = {**NEUTRAL, **({"ignore_eos": True} if work.ignore_eos else {}), **kind.make(rng, tokens)}
    chat = work.chat or kind.needs_chat
    body = make_body(model, prompt, tokens, dialect.translate(fields, chat=chat), chat=chat)
    call = Call(body, chat, may_be_empty=True, leave_after_deltas=leave_deltas, leave_after_s=leave_s)
    return MixRequest(kind.name, call, work.shared_words + fitting_words, tokens, fitting_words < words)


def _fitting(work: MixWork, words: int, tokens: int) -> tuple[int, int]:
    """Words and tokens that the context holds: the answer has half of it at the most, the prompt the rest."""
    if work.context_tokens is None:
        return words, tokens
    tokens = max(1, min(tokens, work.context_tokens // 2))
    room = int((work.context_tokens - tokens - _TEMPLATE_TOKENS) / _TOKENS_A_WORD) - work.shared_words
    return max(1, min(words, room)), tokens


def _disconnect_of(work: MixWork, rng: random.Random, tokens: int) -> tuple[int | None, float | None]:
    """After how many deltas, or after how many seconds, the client leaves."""
    leaves, early, share = rng.random() < work.leave_share, rng.random() < _EARLY, rng.random()
    if not leaves:
        return None, None
    if early or tokens == 1:
        return None, _EARLY_S * share
    return 1 + int(share * (tokens - 1)), None
