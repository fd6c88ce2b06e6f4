"""Requests of all kinds for an engine itself: token ids and sampling parameters in place of texts and JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from realizar.bench.mix.grammars import Expression
from realizar.bench.mix.kinds import KINDS, NEUTRAL, Fields, find_kind
from realizar.bench.serve_workload import Lengths
from realizar.sampling_params import SamplingParams, StructuredOutput

_SHARED_TOKENS = (0, 0, 40, 300)  # that a prompt begins with, and others too
_MORE_LOGPROBS = (None, None, 0, 5)  # for the kinds that have none of their own


@dataclass(frozen=True, slots=True)
class Subject:
    """One request.

    Attributes:
        name: unique. kind: of `KINDS`.
        prompt: token ids.
        max_tokens: of its answer.
    """

    name: str
    kind: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SubjectWork:
    """Requests to draw.

    Attributes:
        vocab_size: of the model.
        prompt_tokens, output_tokens: lengths.
        kinds: their names; they come in turn.
        seed: of everything drawn.
    """

    vocab_size: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    kinds: Sequence[str] = tuple(KINDS)
    seed: int = 0


def draw_subject(work: SubjectWork, number: int) -> Subject:
    """The request of that number; its seed makes its choices, so that it has one answer.

    Some prompts begin alike. Half of the kinds without log-probabilities ask for some, which show what tokens hide.
    """
    rng = random.Random(f"{work.seed}/{number}")
    kind = find_kind(work.kinds[number % len(work.kinds)], "kinds")
    length, tokens = work.prompt_tokens.draw(rng), work.output_tokens.draw(rng)
    common = random.Random(work.seed)
    shared = [common.randrange(work.vocab_size) for _ in range(min(rng.choice(_SHARED_TOKENS), length - 1))]
    own = [rng.randrange(work.vocab_size) for _ in range(length - len(shared))]
    sampling = to_sampling({**NEUTRAL, **kind.make(rng, tokens)}, rng, work.vocab_size)
    return Subject(f"{kind.name} {number}", kind.name, (*shared, *own), sampling, tokens)


def to_sampling(fields: Fields, rng: random.Random, vocab_size: int) -> SamplingParams:
    """A kind's fields as parameters of an engine.

    Stop strings are left away, since text is made elsewhere. A call of a tool is an object with its name and arguments.
    """
    given: dict[str, Any] = {"logprobs": rng.choice(_MORE_LOGPROBS), "seed": rng.getrandbits(32), "ignore_eos": True}
    for name, value in fields.items():
        if name == "regex" and isinstance(value, Expression):
            given["structured"] = StructuredOutput("regex", value.regex)
        elif name == "json_schema":
            given["structured"] = StructuredOutput("json_schema", json.dumps(value))
        elif name == "tools":
            given["structured"] = StructuredOutput("json_schema", json.dumps(_call_schema(value)))
        elif name == "logit_bias":
            given[name] = {int(key) % vocab_size: bias for key, bias in value.items()}
        elif name not in ("stop", "tool_choice"):
            given[name] = value
    return SamplingParams(**given)


def _call_schema(tools: Sequence[Fields]) -> Fields:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["function"]["name"]}, "arguments": tool["function"]["parameters"]},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"anyOf": calls}
