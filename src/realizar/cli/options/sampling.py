"""Sampling parameters as options. Missing options take the defaults of the model's files, then the built-in ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Self

from cyclopts import Parameter

from realizar.cli.options.arguments import MaybeInteger
from realizar.errors import InvalidRequestError
from realizar.sampling_params import SamplingParams


@Parameter(name="*", group="Sampling", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Options with the names of `SamplingParams`' fields. Given options replace the defaults of the model.

    Attributes:
        max_tokens: maximum of tokens to generate; default the rest of the context.
        min_tokens: minimum of tokens before the answer may end.
        temperature: temperature of sampling; 0 is greedy. Default the value of the model's files, else 0.8.
        top_k: keep this number of most probable tokens; 0 is off. Default the files' value, else 40.
        top_p: keep the most probable tokens up to this sum; 1 is off. Default the files' value, else 0.95.
        min_p: drop tokens less probable than this share of the most probable. Default the files' value, else 0.05.
        typical_p: locally typical sampling; 1 is off.
        top_n_sigma: keep logits within this number of standard deviations of the largest; 0 is off.
        xtc_probability: probability of removing the top choices of a token.
        xtc_threshold: probability from which a token is a top choice.
        dry_multiplier: strength of the penalty on repeated sequences; 0 is off.
        dry_base: growth of that penalty with the length of a sequence.
        dry_allowed_length: longest repeated sequence without a penalty.
        dry_penalty_last_n: number of last tokens to search for repetitions; -1 is all.
        mirostat: 2 keeps the surprise at a target, instead of the truncations above.
        mirostat_tau: target surprise of mirostat, in bits.
        mirostat_eta: learning rate of mirostat.
        repetition_penalty: penalty on tokens of prompt and output; 1 is off.
        presence_penalty: penalty on tokens of the output; 0 is off.
        frequency_penalty: penalty on tokens of the output, times their count; 0 is off.
        seed: the same seed gives the same text; on a GPU only if the batches are the same.
        stop: text that ends the answer; may be repeated.
        ignore_eos: continue after the model's end tokens.
    """

    max_tokens: Annotated[MaybeInteger, Parameter(name=("--max-tokens", "--n-predict", "-n"))] = None
    min_tokens: MaybeInteger = None
    temperature: Annotated[float | None, Parameter(name=("--temperature", "--temp"))] = None
    top_k: MaybeInteger = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: Annotated[float | None, Parameter(name=("--typical-p", "--typical"))] = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: MaybeInteger = None
    dry_penalty_last_n: MaybeInteger = None
    mirostat: MaybeInteger = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    repetition_penalty: Annotated[float | None, Parameter(name=("--repetition-penalty", "--repeat-penalty"))] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: MaybeInteger = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def checked(self) -> Self:
        """Check every value, before a model is loaded, and return these options.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        self.apply(SamplingParams())
        return self

    def apply(self, defaults: SamplingParams) -> SamplingParams:
        """The defaults with the given options applied.

        Raises:
            InvalidRequestError: a value is out of range.
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changes = {name: value for name, value in given.items() if value is not None and value != ()}
        if not self.ignore_eos:
            del changes["ignore_eos"]
        return replace(defaults, **changes)


def parse_assignments(words: str, current: SamplingParams) -> SamplingParams:
    """Apply assignments such as `temperature=0.5 top_k=40`, the format of `/params`.

    Raises:
        InvalidRequestError: a name is unknown, or a value has a wrong type or is out of range.
    """
    changes: dict[str, Any] = {}
    known = _parsers()
    for word in words.split():
        name, equals, text = word.partition("=")
        parse = known.get(name.replace("-", "_"))
        if parse is None or not equals:
            raise InvalidRequestError(f"{word} is not NAME=VALUE with a known name ({', '.join(known)})")
        try:
            changes[name.replace("-", "_")] = parse(text)
        except ValueError as error:
            raise InvalidRequestError(f"{name}: {text!r} is not of type {parse.__name__}", name) from error
    return replace(current, **changes)


def describe(params: SamplingParams) -> str:
    """Every parameter that has an option, as `name=value` separated by spaces."""
    return " ".join(f"{name}={getattr(params, name)}" for name in _parsers())


def _parsers() -> Mapping[str, type[int | float]]:
    """The numeric parameters by name, each with the type that parses it."""
    annotations = {field.name: str(field.type) for field in fields(SamplingParams)}
    options = {field.name for field in fields(SamplingOptions)}
    return {
        name: float if "float" in text else int
        for name, text in annotations.items()
        if name in options and text in ("int", "float", "int | None")
    }
