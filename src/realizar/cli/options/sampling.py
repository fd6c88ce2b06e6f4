"""Sampling parameters as options. Missing options take the defaults of the model's files, then the built-in ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from cyclopts import Parameter

from realizar.cli.options.arguments import MaybeInteger
from realizar.errors import InvalidRequestError
from realizar.sampling_params import SAMPLERS, Sampler, SamplingParams


def _option(sampler: Sampler) -> tuple[str, Any, Any]:
    text = sampler.help
    if sampler.built_in is not None:
        text += f". Default the value of the model's files, else {sampler.built_in}"
    names = (f"--{sampler.name.replace('_', '-')}", *sampler.options)
    kind: Any = float | None if sampler.kind is float else MaybeInteger
    return sampler.name, Annotated[kind, Parameter(name=names, help=f"{text}.")], field(default=None)


if TYPE_CHECKING:

    class _Samplers:
        """The options of the samplers."""
else:
    _Samplers = make_dataclass("_Samplers", [_option(each) for each in SAMPLERS], frozen=True, slots=True, kw_only=True)


@Parameter(name="*", group="Sampling", negative=())
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(_Samplers):
    """Options with the names of `SamplingParams`' fields. Given options replace the defaults of the model.

    Attributes:
        max_tokens: maximum of tokens to generate; default the rest of the context.
        min_tokens: minimum of tokens before the answer may end.
        seed: the same seed gives the same text; on a GPU only if the batches are the same.
        stop: text that ends the answer; may be repeated.
        ignore_eos: continue after the model's end tokens.
    """

    max_tokens: Annotated[MaybeInteger, Parameter(name=("--max-tokens", "--n-predict", "-n"))] = None
    min_tokens: MaybeInteger = None
    seed: MaybeInteger = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def checked(self) -> Self:
        """Check every value, before a model is loaded. It raises InvalidRequestError if one is out of range."""
        self.apply(SamplingParams())
        return self

    def apply(self, defaults: SamplingParams) -> SamplingParams:
        """The defaults with the given options applied. It raises InvalidRequestError if a value is out of range."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        changes = {name: value for name, value in given.items() if value is not None and value != ()}
        if not self.ignore_eos:
            del changes["ignore_eos"]
        return replace(defaults, **changes)


def parse_assignments(words: str, current: SamplingParams) -> SamplingParams:
    """Apply assignments such as `temperature=0.5 top_k=40`, the format of `/params`.

    It raises InvalidRequestError if a name is unknown, or a value has a wrong type or is out of range.
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
    annotations = {field.name: str(field.type) for field in fields(SamplingParams)}
    options = {field.name for field in fields(SamplingOptions)}
    return {
        name: float if "float" in text else int
        for name, text in annotations.items()
        if name in options and text in ("int", "float", "int | None")
    }
