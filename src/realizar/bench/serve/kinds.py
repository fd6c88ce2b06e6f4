"""The kinds of requests of a load, and how often a mix draws each.

A kind's fields have the names of realizar's API, which are vLLM's where OpenAI's API has none. Three fields are in a
form of their own, which `dialects` turns into a server's: `json_schema`, `regex` and `logprobs`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar.errors import InvalidRequestError

# Words that are one token, or nearly so, in the vocabularies of today's models.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city name president team minute idea kid body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air
teacher force education foot boy age policy process music market sense nation plan college interest death experience
effect use class control care field development role effort rate heart drug show leader light voice wife police mind
difference period value building action authority model activity road table
"""
_WORDS = _TEXT.split()


def any_words(rng: random.Random, count: int) -> list[str]:
    return rng.choices(_WORDS, k=count)


# Schemas, tools and expressions of requests that constrain their answers. Schemas are long enough for the answer that a
# request asks for, whatever a model puts into them, so that also a model of random weights goes on to the end. Some are
# sent again and again, as an application sends its own, others once.
_TOKENS_A_FIELD = 5  # at the least: the key, a colon, a value and a comma
_SIZES = (4, 16, 64)
_KNOWN = 6
_NEW_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Expression:
    """One language as a regular expression, and as llama.cpp's GBNF."""

    regex: str
    gbnf: str


REGEX = Expression(r"([a-z]{1,12} )+\.", 'root ::= ([a-z]{1,12} " ")+ "."')


def any_schema(rng: random.Random, tokens: int) -> dict[str, Any]:
    """A JSON schema of an object whose fields are all required, for an answer of `tokens` tokens, 320 at the most."""
    return _any_object(rng, next((size for size in _SIZES if size * _TOKENS_A_FIELD >= tokens), _SIZES[-1]))


def any_tools(rng: random.Random) -> dict[str, Any]:
    """Two tools of four arguments, one of which has to be called. The answer ends with the call, as calls are short."""
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": _any_object(rng, _SIZES[0])}}
        for name, text in (("look_up", "Looks a record up."), ("store", "Stores a record."))
    ]
    return {"tools": tools, "tool_choice": "required"}


def _any_object(rng: random.Random, size: int) -> dict[str, Any]:
    """One of a few objects of `size` fields, or now and then a new one."""
    is_new = rng.random() < _NEW_SHARE
    return _object(random.Random(rng.getrandbits(32) if is_new else rng.randrange(_KNOWN)), size)


def _object(rng: random.Random, size: int) -> dict[str, Any]:
    """An object of `size` fields; the same state of `rng` gives the same one."""
    names = [f"{word}_{place}" for place, word in enumerate(any_words(rng, size))]
    return {
        "type": "object",
        "properties": {name: _value(rng) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _value(rng: random.Random) -> dict[str, Any]:
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "integer", "minimum": 0, "maximum": 9999}
    if kind == 1:
        return {"type": "boolean"}
    if kind == 2:
        return {"enum": any_words(rng, 4)}
    return {"type": "string", "maxLength": 40}


Fields = dict[str, Any]

NEUTRAL: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Fields of every request: what a request leaves out is up to the server, and servers differ."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request.

    Attributes:
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
    """It raises InvalidRequestError, which names `param`, if there is none."""
    if name not in KINDS:
        raise InvalidRequestError(f"{param}: {name} is not a kind of request; the kinds are {', '.join(KINDS)}", param)
    return KINDS[name]


def parse_weights(texts: Sequence[str], param: str) -> dict[str, float]:
    """Weights by kind, of `top-p=4` and the like; several in one text are divided by commas. None gives all kinds.

    It raises InvalidRequestError, which names `param`, if one is malformed or not known, or none is above 0.
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
