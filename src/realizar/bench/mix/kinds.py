"""The kinds of requests in a mix, and how often each is drawn.

A kind's fields have the names of realizar's API, which are vLLM's where OpenAI's API has none. Three fields are in a
form of their own, which `dialects` turns into a server's: `json_schema`, `regex` and `logprobs`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar.bench.mix.grammars import REGEX, any_schema, any_tools
from realizar.errors import InvalidRequestError

Fields = dict[str, Any]

NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Fields of every request: what a request leaves out is up to the server, and servers differ."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request.

    Attributes:
        name: in options and reports.
        weight: how often the kind is drawn unless weights are given.
        make: fields of one request, from a random generator and the tokens of its answer.
        needs_chat: it can only be sent as a chat.
    """

    name: str
    weight: float
    make: Callable[[random.Random, int], Fields]
    needs_chat: bool = False


def _always(**fields: Any) -> Callable[[random.Random, int], Fields]:
    return lambda rng, tokens: fields


def _biased(rng: random.Random, tokens: int) -> Fields:
    """Tokens that are made likelier and others that are forbidden; ids that every vocabulary of today has."""
    ids = rng.sample(range(300, 30_000), 8)
    return {"logit_bias": {str(id_): (5.0, -100.0)[place % 2] for place, id_ in enumerate(ids)}}


_KINDS = (
    Kind("greedy", 15, _always(temperature=0.0)),
    Kind("temperature-top-p", 35, _always(temperature=0.8, top_p=0.95)),
    Kind("temperature", 9, _always(temperature=1.0)),
    Kind("top-p", 5, _always(top_p=0.95)),
    Kind("top-k-top-p-min-p", 8, _always(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)),
    Kind("typical", 1, _always(temperature=0.8, typical_p=0.95)),
    Kind("mirostat", 1, _always(mirostat=2, mirostat_tau=5.0, mirostat_eta=0.1)),
    Kind(
        "penalties",
        5,
        _always(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.3),
    ),
    Kind("bias", 1, _biased),
    Kind("logprobs", 4, _always(temperature=0.8, top_p=0.95, logprobs=5)),
    Kind("dry", 2, _always(temperature=0.8, dry_multiplier=0.8, dry_base=1.75, dry_allowed_length=2)),
    Kind("regex", 2, lambda rng, tokens: {"temperature": 0.8, "regex": REGEX}),
    Kind("json-schema", 5, lambda rng, tokens: {"temperature": 0.8, "json_schema": any_schema(rng, tokens)}),
    Kind("tools", 3, lambda rng, tokens: {"temperature": 0.8, **any_tools(rng)}, needs_chat=True),
    Kind("stop", 2, _always(temperature=0.8, top_p=0.95, stop=["\n\nUser:", "<END>", "###"])),
    Kind("choices", 2, _always(temperature=0.8, top_p=0.95, n=3)),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}


def find_kind(name: str, param: str) -> Kind:
    """The kind of that name.

    Raises:
        InvalidRequestError: there is none; names `param`.
    """
    if name not in KINDS:
        raise InvalidRequestError(f"{param}: {name} is not a kind of request; the kinds are {', '.join(KINDS)}", param)
    return KINDS[name]


def parse_weights(texts: Sequence[str], param: str) -> dict[str, float]:
    """Weights by kind, of `top-p=4` and the like; several in one text are divided by commas. None gives all kinds.

    Raises:
        InvalidRequestError: one is malformed or not known, or none is above 0; names `param`.
    """
    weights: dict[str, float] = {}
    for part in (part for text in texts for part in text.split(",") if part.strip()):
        name, _, number = part.strip().partition("=")
        kind = find_kind(name, param)
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise InvalidRequestError(f"{param} must be of KIND=WEIGHT, such as greedy=2, not {part.strip()}", param)
        weights[kind.name] = weight
    if texts and not any(weights.values()):
        raise InvalidRequestError(f"{param}: no kind has a weight above 0", param)
    return {name: weight for name, weight in weights.items() if weight} or {kind.name: kind.weight for kind in _KINDS}
