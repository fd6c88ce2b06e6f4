"""What a load sends, and when: kinds, lengths, arrivals. Each request is drawn by its number from one seed, so that any
process can draw any of them, and two servers get the same.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from realizar.bench.serve.dialects import Dialect, make_body
from realizar.bench.serve.kinds import KINDS, NEUTRAL, any_words, find_kind
from realizar.errors import InvalidRequestError

_TOKENS_A_WORD = 1.3  # at the most, in the vocabularies of today's models
_TEMPLATE_TOKENS = 64  # of a chat, and of a prompt's first token
_EARLY = 0.2  # of those who leave: they do so before the first token, or soon after
_EARLY_S = 2.0
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TOKEN_IDS = range(300, 30_000)  # ordinary tokens in every vocabulary of today

Protocol = Literal["sglang", "vllm"]
"""Whose `bench serve` a load follows."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> Lengths:
        """Parse `128` or `64-256`. InvalidRequestError, which names `param`: it is neither, or the range is empty."""
        match = _RANGE.fullmatch(text.strip())
        low = int(match.group(1)) if match else 0
        high = int(match.group(2) or low) if match else 0
        if not 1 <= low <= high:
            raise InvalidRequestError(
                f"{param} must be a length such as 128 or a range such as 64-256, not {text}", param
            )
        return cls(low, high)

    @classmethod
    def around(cls, length: int, ratio: float, protocol: Protocol) -> Lengths:
        """Lengths by a range ratio, whose meaning differs: 1 is fixed at SGLang, 0 is fixed at vLLM.

        SGLang draws from length * ratio to length (`compute_random_lens` of its benchmark), vLLM from length * (1 -
        ratio) to length * (1 + ratio) (`RandomDataset.get_sampling_params`). InvalidRequestError: a ratio out of range.
        """
        if not (0 <= ratio <= 1 if protocol == "sglang" else 0 <= ratio < 1):
            end = "1" if protocol == "sglang" else "below 1"
            raise InvalidRequestError(
                f"random-range-ratio must be from 0 to {end} for {protocol}, not {ratio:g}", "random-range-ratio"
            )
        if protocol == "sglang":
            return cls(max(int(length * ratio), 1), length)
        return cls(max(math.floor(length * (1 - ratio)), 1), math.ceil(length * (1 + ratio)))

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths between the percentiles that a study has published: even between two of them, none above the highest.

    `points` are (share of all requests, length), both rising; the first share is 0 and its length the shortest.
    """

    source: str
    points: tuple[tuple[float, int], ...]

    def draw(self, rng: random.Random) -> int:
        """One length; the requests above the highest known share have that share's length."""
        share = rng.random()
        shares = [known for known, _ in self.points]
        if share >= shares[-1]:
            return self.points[-1][1]
        place = bisect_right(shares, share)
        (low_share, low), (high_share, high) = self.points[place - 1], self.points[place]
        return round(low + (high - low) * (share - low_share) / (high_share - low_share))


LengthSource: TypeAlias = Lengths | Quantiles

_STUDY = "BurstGPT's GPT-4 conversations, percentiles 50, 80, 95 and 99 as in table 1 of Llumnix (OSDI 2024)"

# BurstGPT (arXiv 2401.17644) is a trace of requests to Azure's OpenAI service. The study gives means of 830 and 271
# tokens; even between the percentiles, with 1 as the shortest, they are 883 and 288.
TRACE_PROMPTS = Quantiles(_STUDY, ((0.0, 1), (0.5, 582), (0.8, 1427), (0.95, 2345), (0.99, 3549)))
TRACE_ANSWERS = Quantiles(_STUDY, ((0.0, 1), (0.5, 243), (0.8, 434), (0.95, 669), (0.99, 964)))


@dataclass(frozen=True, slots=True)
class Workload:
    """A load.

    Attributes:
        weights: how often each kind is drawn.
        num_requests: after which the load ends; None where `seconds` says when.
        seconds: after which no request is begun, and nothing is counted any more.
        prompt_length, output_tokens: words of a prompt, or tokens with `token_ids`; tokens of an answer.
        rate_per_s: mean rate of arrivals, at random times (Poisson); None has all arrive at the start.
        concurrency: maximum of open requests: one that has arrived waits until another ends. None is no limit.
        leave_share: of the clients that leave before their answer is complete.
        context_tokens: of the server, where it is known: longer requests are shortened to it.
        exact: requests are as asked for: not shortened, and an answer without text is a failure.
        shared_words: words that all prompts start with, besides their own.
        token_ids: prompts are random token ids, so that they have as many tokens at every server; chats have words.
        fields: of every request, in place of its kind's.
        ignore_eos: ask for answers of full length.
        chat: send all kinds as chats.
        seed, salt: of everything drawn.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {kind.name: kind.weight for kind in KINDS.values()})
    num_requests: int | None = None
    seconds: float | None = None
    prompt_length: LengthSource = TRACE_PROMPTS
    output_tokens: LengthSource = TRACE_ANSWERS
    rate_per_s: float | None = None
    concurrency: int | None = None
    leave_share: float = 0.0
    context_tokens: int | None = None
    exact: bool = False
    shared_words: int = 0
    token_ids: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
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
        if self.seconds is not None and self.rate_per_s is None and self.concurrency is None:
            raise InvalidRequestError("seconds need a rate of arrivals or a number of requests open at a time", "rate")
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
class PlannedRequest:
    """One streamed request, ready to be sent, and when its client leaves.

    Attributes:
        body: JSON.
        chat: true for a chat, false for a completion.
        prompt_length: words or token ids of the prompt. max_tokens: of the answer.
        was_shortened: it would not have fitted into the context.
        may_be_empty: an answer without a text is none the worse, as where a stop string comes first.
        leave_after_deltas, leave_after_s: after which the client closes the connection; None for never.
    """

    kind: str
    body: bytes
    chat: bool
    prompt_length: int
    max_tokens: int
    was_shortened: bool = False
    may_be_empty: bool = False
    leave_after_deltas: int | None = None
    leave_after_s: float | None = None


def draw_request(work: Workload, number: int, dialect: Dialect, model: str) -> PlannedRequest:
    """The request of that number. It raises UnknownFieldsError if the server does not know a field of its kind."""
    rng = random.Random(f"{work.seed}/{work.salt}/{number}")
    kind = find_kind(rng.choices(list(work.weights), weights=list(work.weights.values()))[0], "kind")
    length, tokens = work.prompt_length.draw(rng), work.output_tokens.draw(rng)
    fitting, tokens = _fitting(work, length, tokens)
    leave_deltas, leave_s = _disconnect_of(work, rng, tokens)
    chat = work.chat or kind.needs_chat
    prompt: str | list[int]
    if work.token_ids and not chat:
        prompt = rng.choices(_TOKEN_IDS, k=fitting)
    else:
        shared = any_words(random.Random(work.seed), work.shared_words)
        prompt = " ".join([*shared, *any_words(rng, fitting)])
        fitting, length = fitting + work.shared_words, length + work.shared_words
    eos = {"ignore_eos": True} if work.ignore_eos else {}
    fields = dialect.translate({**NEUTRAL, **eos, **kind.make(rng, tokens), **work.fields}, chat=chat)
    body = make_body(model, prompt, tokens, fields, chat=chat)
    return PlannedRequest(
        kind.name, body, chat, fitting, tokens, fitting < length, not work.exact, leave_deltas, leave_s
    )


def _fitting(work: Workload, length: int, tokens: int) -> tuple[int, int]:
    """Words and tokens that the context holds: the answer has half of it at the most, the prompt the rest."""
    if work.context_tokens is None or work.exact:
        return length, tokens
    tokens = max(1, min(tokens, work.context_tokens // 2))
    room = int((work.context_tokens - tokens - _TEMPLATE_TOKENS) / _TOKENS_A_WORD) - work.shared_words
    return max(1, min(length, room)), tokens


def _disconnect_of(work: Workload, rng: random.Random, tokens: int) -> tuple[int | None, float | None]:
    leaves, early, share = rng.random() < work.leave_share, rng.random() < _EARLY, rng.random()
    if not leaves:
        return None, None
    if early or tokens == 1:
        return None, _EARLY_S * share
    return 1 + int(share * (tokens - 1)), None
