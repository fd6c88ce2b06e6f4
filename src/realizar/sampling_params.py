"""Validated sampling parameters. Names and neutral values are vLLM's. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, get_args

from realizar.errors import InvalidRequestError

StructuredKind = Literal["json_object", "json_schema", "regex", "lark", "choice", "nested"]

NESTED_GRAMMAR = "nested"
"""The name by which the Lark grammar of the kind `nested` has the other one in its rules: `@nested`."""

BUILT_IN_SAMPLING: Mapping[str, float | int] = MappingProxyType(
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
)
"""Defaults of commands, server and `LLM` if a model's files have none: llama.cpp's values. Small models write word
salad without them. `SamplingParams()` itself is neutral, as vLLM's is."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that the output must follow to its end. The engine compiles it, or refuses it.

    Attributes:
        kind: `json_object` is any JSON object; `choice` is one of some strings; `nested` is a Lark grammar with another
            grammar of any of the other kinds in it.
        value: the schema as JSON text, the regular expression (of the whole output, in Rust's syntax, with `\\d`,
            `\\w` and `\\s` of ASCII alone, as in a schema's `pattern`), the Lark grammar (as llguidance reads it;
            in its own terminals, as `/\\d/`, these are of all scripts), the choices as a JSON list of strings, a
            JSON list of the Lark grammar and the other one's kind and value; "" for `json_object`.
    """

    kind: StructuredKind
    value: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructuredKind):
            known = ", ".join(get_args(StructuredKind))
            raise InvalidRequestError(
                f"the kind of structured output must be one of {known}, not {self.kind}", "structured"
            )
        value: object = self.value
        if not isinstance(value, str):
            raise InvalidRequestError(f"the {self.kind} must be given as text, not {value!r}", "structured")
        if (self.kind == "json_object") != (not value):
            raise InvalidRequestError(
                "json_object takes no value" if value else f"the {self.kind} is empty", "structured"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request. Every field is honoured; a value out of range raises `InvalidRequestError`.

    The order in which they act: logit bias, repetition penalty (prompt and output), presence and frequency
    penalties (output), DRY, temperature, top-n-sigma, top-k, typical, top-p, min-p, XTC. Mirostat replaces the
    truncations. Temperature 0 is greedy.

    Attributes:
        max_tokens: tokens to generate; None is the rest of the context.
        min_tokens: output tokens before which end-of-generation ids and stop strings are not honoured.
        temperature, top_k (0: off), top_p, min_p, typical_p, top_n_sigma (0: off): truncations.
        xtc_probability, xtc_threshold: exclude-top-choices.
        dry_multiplier (0: off), dry_base, dry_allowed_length, dry_penalty_last_n (-1: all): DRY. Sequence breakers
            are token ids: the caller tokenizes the strings.
        mirostat: 0 or 2. mirostat_tau, mirostat_eta: target surprise in bits and learning rate.
        repetition_penalty, presence_penalty, frequency_penalty.
        logit_bias: token id to a number added to its logit.
        seed: same seed, same text, on the CPU whatever else runs; on a GPU logits depend a little on what else is in a
            step. None draws a fresh one.
        logprobs: top log-probabilities wanted per generated token; None for none, 0 for the chosen token's alone.
        prompt_logprobs: the same at every prompt position but the first.
        stop: strings that end the output and are not part of it. stop_token_ids: ids that do.
        ignore_eos: go on past the model's end-of-generation ids.
        n: independent choices.
        structured: grammar of the output; every token that would break it is forbidden before all else acts. Once it
            is complete only ids that end the choice are left, so then `ignore_eos` and `min_tokens` do not hold.
        structured_begun: ids that spell the beginning of what the grammar describes, where the prompt ends with it
            already and the output goes on from there.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[int, ...] = ()
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    structured: StructuredOutput | None = None
    structured_begun: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            raise InvalidRequestError("stop must be a sequence of strings, not a string", "stop")
        for name, low, high in _RANGES:
            value: Any = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            kind, meaning = (Integral, "an integer") if name in _INTEGERS else (Real, "a number")
            right_kind = isinstance(value, kind)
            if not right_kind:
                raise InvalidRequestError(f"{name} must be {meaning}, not {value!r}", name)
            if not low <= value <= high:  # nor is NaN
                raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}", name)
        for name in ("top_p", "typical_p", "repetition_penalty"):
            if getattr(self, name) <= 0:
                raise InvalidRequestError(f"{name} must be above 0, not {getattr(self, name)}", name)
        if self.mirostat not in (0, 2):
            raise InvalidRequestError(f"mirostat must be 0 or 2, not {self.mirostat}", "mirostat")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop strings must not be empty", "stop")
        if any(not math.isfinite(bias) or abs(bias) > 100 for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias values must be between -100 and 100", "logit_bias")
        if self.structured_begun and self.structured is None:
            raise InvalidRequestError("structured_begun needs structured", "structured_begun")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens"
            )

    @property
    def greedy(self) -> bool:
        """True if the largest logit is chosen."""
        return self.temperature == 0.0


_OPTIONAL = frozenset({"max_tokens", "seed", "logprobs", "prompt_logprobs"})
_INTEGERS = _OPTIONAL | {"min_tokens", "top_k", "dry_allowed_length", "dry_penalty_last_n", "n"}
_INFINITE = 1 << 53
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 1, _INFINITE),
    ("min_tokens", 0, _INFINITE),
    ("temperature", 0, 100),
    ("top_k", -1, _INFINITE),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("typical_p", 0, 1),
    ("top_n_sigma", 0, 1e6),
    ("xtc_probability", 0, 1),
    ("xtc_threshold", 0, 1),
    ("dry_multiplier", 0, 1e6),
    ("dry_base", 1, 1e6),
    ("dry_allowed_length", 1, _INFINITE),
    ("dry_penalty_last_n", -1, _INFINITE),
    ("mirostat_tau", 0, 1e6),
    ("mirostat_eta", 0, 1e6),
    ("repetition_penalty", 0, 1e6),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("seed", -(2**63), 2**64 - 1),
    ("logprobs", 0, 1000),
    ("prompt_logprobs", 0, 1000),
    ("n", 1, 128),
)
