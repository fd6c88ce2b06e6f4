"""Validated sampling parameters. Names and neutral values are vLLM's. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from realizar.errors import InvalidRequestError
from realizar.ranges import check_ranges, number

StructuredKind = Literal["json_object", "json_schema", "regex", "lark", "choice", "nested"]

NESTED_GRAMMAR = "nested"
"""The name by which the Lark grammar of the kind `nested` has the other one in its rules: `@nested`."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """A parameter of the samplers, as its field of `SamplingParams` declares it: one line of `SAMPLERS`.

    Checks, fields of requests, options, defaults of models and the records of rows that kernels read are made from it.

    Attributes:
        help: of its option.
        built_in: default of commands, server and `LLM` where a model's files have none; None is the field's.
        options: further names of its option.
        servers: whose API has it under this name, beside ours: OpenAI's, and so all, or vLLM's.
        llama_cpp: its name in llama.cpp's API.
        ollama: its name among Ollama's options, if it is one.
        gguf: its key in a GGUF file, after `general.sampling.`; json: in `generation_config.json`.
        name: of its field. kind: int or float.
    """

    help: str
    built_in: float | None = None
    options: tuple[str, ...] = ()
    servers: Literal["openai", "vllm"] | None = None
    llama_cpp: str | None = None
    ollama: str | None = None
    gguf: str | None = None
    json: str | None = None
    name: str = ""
    kind: type[int | float] = float


def _sampler(default: float, low: float, high: float, does: str, *, above: bool = False, **names: Any) -> Any:
    """A field of `SamplingParams`, with its range and its `Sampler`: what it does, and its names elsewhere."""
    return number(default, low, high, above=above, sampler=Sampler(does, **names))


_INFINITE = 1 << 53


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
        value: object = self.value
        if self.kind not in get_args(StructuredKind):
            known = ", ".join(get_args(StructuredKind))
            fault = f"the kind of structured output must be one of {known}, not {self.kind}"
        elif not isinstance(value, str):
            fault = f"the {self.kind} must be given as text, not {value!r}"
        elif (self.kind == "json_object") != (not value):
            fault = "json_object takes no value" if value else f"the {self.kind} is empty"
        else:
            return
        raise InvalidRequestError(fault, "structured")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request. Every field is honoured; a value out of range raises `InvalidRequestError`.

    The order in which they act: logit bias, repetition penalty (prompt and output), presence and frequency
    penalties (output), DRY, temperature, top-n-sigma, top-k, typical, top-p, min-p, XTC. Mirostat replaces the
    truncations. Temperature 0 is greedy.

    Attributes:
        max_tokens: tokens to generate; None is the rest of the context.
        min_tokens: output tokens before which end-of-generation ids and stop strings are not honoured.
        temperature, ...: each sampler's field declares what it does.
        dry_sequence_breakers: token ids: the caller tokenizes the strings.
        logit_bias: token id to a number added to its logit.
        seed: same seed, same text, on the CPU whatever else runs; on a GPU logits depend a little on what else is in a
            step. None draws a fresh one.
        logprobs: top log-probabilities wanted per generated token; None for none, 0 for the sampled token's alone.
        prompt_logprobs: the same at every prompt position but the first.
        stop: strings that end the output and are not part of it. stop_token_ids: ids that do.
        ignore_eos: go on past the model's end-of-generation ids.
        n: independent choices.
        structured: grammar of the output; every token that would break it is forbidden before all else acts. Once it
            is complete only ids that end the choice are left, so then `ignore_eos` and `min_tokens` do not hold.
        structured_begun: ids that spell the beginning of what the grammar describes, where the prompt ends with it
            already and the output goes on from there.
    """

    max_tokens: int | None = number(None, 1, _INFINITE)
    min_tokens: int = number(0, 0, _INFINITE)
    temperature: float = _sampler(
        1.0, 0, 100, "temperature of sampling; 0 is greedy", built_in=0.8, options=("--temp",), servers="openai",
        ollama="temperature", gguf="temp", json="temperature",
    )  # fmt: skip
    top_k: int = _sampler(
        0, -1, _INFINITE, "keep this number of most probable tokens; 0 is off", built_in=40, servers="vllm",
        ollama="top_k", gguf="top_k", json="top_k",
    )  # fmt: skip
    top_p: float = _sampler(
        1.0, 0, 1, "keep the most probable tokens up to this sum; 1 is off", above=True, built_in=0.95,
        servers="openai", ollama="top_p", gguf="top_p", json="top_p",
    )  # fmt: skip
    min_p: float = _sampler(
        0.0, 0, 1, "drop tokens less probable than this share of the most probable", built_in=0.05, servers="vllm",
        ollama="min_p", gguf="min_p", json="min_p",
    )  # fmt: skip
    typical_p: float = _sampler(
        1.0, 0, 1, "locally typical sampling; 1 is off", above=True, options=("--typical",), ollama="typical_p",
        json="typical_p",
    )  # fmt: skip
    top_n_sigma: float = _sampler(
        0.0, 0, 1e6, "keep logits within this number of standard deviations of the largest; 0 is off"
    )
    xtc_probability: float = _sampler(
        0.0, 0, 1, "probability of removing the top choices of a token", gguf="xtc_probability"
    )
    xtc_threshold: float = _sampler(0.1, 0, 1, "probability from which a token is a top choice", gguf="xtc_threshold")
    dry_multiplier: float = _sampler(0.0, 0, 1e6, "strength of the penalty on repeated sequences; 0 is off")
    dry_base: float = _sampler(1.75, 1, 1e6, "growth of that penalty with the length of a sequence")
    dry_allowed_length: int = _sampler(2, 1, _INFINITE, "longest repeated sequence without a penalty")
    dry_penalty_last_n: int = _sampler(-1, -1, _INFINITE, "number of last tokens to search for repetitions; -1 is all")
    dry_sequence_breakers: tuple[int, ...] = ()
    mirostat: int = _sampler(
        0, 0, 2, "2 keeps the surprise at a target, instead of the truncations above", ollama="mirostat",
        gguf="mirostat",
    )  # fmt: skip
    mirostat_tau: float = _sampler(
        5.0, 0, 1e6, "target surprise of mirostat, in bits", ollama="mirostat_tau", gguf="mirostat_tau"
    )
    mirostat_eta: float = _sampler(0.1, 0, 1e6, "learning rate of mirostat", ollama="mirostat_eta", gguf="mirostat_eta")
    repetition_penalty: float = _sampler(
        1.0, 0, 1e6, "penalty on tokens of prompt and output; 1 is off", above=True, options=("--repeat-penalty",),
        servers="vllm", llama_cpp="repeat_penalty", ollama="repeat_penalty", gguf="penalty_repeat",
        json="repetition_penalty",
    )  # fmt: skip
    presence_penalty: float = _sampler(
        0.0, -2, 2, "penalty on tokens of the output; 0 is off", servers="openai", ollama="presence_penalty"
    )
    frequency_penalty: float = _sampler(
        0.0, -2, 2, "penalty on tokens of the output, times their count; 0 is off", servers="openai",
        ollama="frequency_penalty",
    )  # fmt: skip
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = number(None, -(2**63), 2**64 - 1)
    logprobs: int | None = number(None, 0, 1000)
    prompt_logprobs: int | None = number(None, 0, 1000)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = number(1, 1, 128)
    structured: StructuredOutput | None = None
    structured_begun: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stop: object = self.stop
        if isinstance(stop, str):
            raise InvalidRequestError("stop must be a sequence of strings, not a string", "stop")
        if self.mirostat not in (0, 2):
            raise InvalidRequestError(f"mirostat must be 0 or 2, not {self.mirostat}", "mirostat")
        check_ranges(self)
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
        return self.temperature == 0.0

    @property
    def least_tokens(self) -> int:
        """Tokens up to which stop ids do not end the output.

        Where a grammar is complete, ending is all that is left to sample, however few tokens there are.
        """
        return self.min_tokens if self.structured is None else 0


SAMPLERS: tuple[Sampler, ...] = tuple(
    [
        replace(each.metadata["sampler"], name=each.name, kind=int if each.type == "int" else float)
        for each in fields(SamplingParams)
        if each.metadata.get("sampler")
    ]
)
"""The parameters of the samplers, in the order of their fields."""

BUILT_IN_SAMPLING: Mapping[str, float] = MappingProxyType(
    {each.name: each.built_in for each in SAMPLERS if each.built_in is not None}
)
"""Defaults of commands, server and `LLM` if a model's files have none: llama.cpp's values. Small models write word
salad without them. `SamplingParams()` itself is neutral, as vLLM's is."""
