"""Sampling parameters as options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from cyclopts import App, CycloptsError

from realizar.cli.options.sampling import SamplingOptions, describe, parse_assignments
from realizar.errors import InvalidRequestError
from realizar.sampling_params import BUILT_IN_SAMPLING, SamplingParams

# What makes no sense for one answer in a terminal, takes token ids, or has options of its own.
NOT_OPTIONS = {
    "dry_sequence_breakers",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "structured_begun",
    "stop_token_ids",
    "n",
    "structured",
}


def parsed(words: str) -> SamplingParams:
    application = App(result_action="return_value")
    found: list[SamplingOptions] = []

    @application.default
    def command(*, sampling: SamplingOptions | None = None) -> None:
        found.append(sampling or SamplingOptions())

    application(words, exit_on_error=False, print_error=False)
    return found[0].apply(SamplingParams(temperature=0.7, top_k=20, seed=3))


def test_every_parameter_has_an_option() -> None:
    assert {field.name for field in fields(SamplingOptions)} == {
        field.name for field in fields(SamplingParams)
    } - NOT_OPTIONS


def test_the_models_defaults_hold_where_nothing_is_given() -> None:
    assert parsed("") == SamplingParams(temperature=0.7, top_k=20, seed=3)


def test_zero_is_a_value() -> None:
    given = parsed("--temperature 0 --top-k 0 --seed 0")
    assert (given.temperature, given.top_k, given.seed) == (0.0, 0, 0)


def test_options_of_every_kind() -> None:
    given = parsed("-n 5 --min-p 0.1 --stop END --stop '\n\n' --ignore-eos --mirostat 2 --dry-penalty-last-n -1")
    assert (given.max_tokens, given.min_p, given.stop, given.ignore_eos) == (5, 0.1, ("END", "\n\n"), True)
    assert (given.mirostat, given.dry_penalty_last_n, given.temperature) == (2, -1, 0.7)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        parsed("--top-p 1.5")
    with pytest.raises(InvalidRequestError, match="temperature"):
        parsed("--temperature nan")
    with pytest.raises(CycloptsError):
        parsed("--top-k 1.5")


def test_what_is_described_can_be_assigned() -> None:
    params = SamplingParams(temperature=0.25, top_k=7, min_p=0.125, seed=11, max_tokens=4)
    assert parse_assignments(describe(params), SamplingParams()) == params


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", None), ("temperature", "1"), ("max_tokens", 1.5), ("top_k", 2.5), ("n", None), ("stop", "text")],
)
def test_values_of_the_wrong_type_are_refused(name: str, value: object) -> None:
    """They are refused when given, since a step that failed on one would end the engine for all requests."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.param == name


def test_numpy_numbers_are_numbers() -> None:
    assert SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), max_tokens=None).top_k == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, -1])
def test_numbers_out_of_range_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequestError, match="temperature must be between 0 and 100"):
        SamplingParams(temperature=value)


def test_every_64_bit_seed_is_taken() -> None:
    assert {SamplingParams(seed=seed).seed for seed in (-(2**63), 2**64 - 1)} == {-(2**63), 2**64 - 1}
    with pytest.raises(InvalidRequestError, match="seed"):
        SamplingParams(seed=2**64)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--temp 0.25", "temperature", 0.25),
        ("--repeat-penalty 1.5", "repetition_penalty", 1.5),
        ("--typical 0.5", "typical_p", 0.5),
        ("--n-predict 9", "max_tokens", 9),
    ],
)
def test_names_of_llama_cpp(words: str, name: str, value: float) -> None:
    assert getattr(parsed(words), name) == value


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_help_states_what_is_built_in(realizar: Callable[..., Any], command: str) -> None:
    words = " ".join(realizar(command, "--help").stdout.replace("│", " ").split())
    for name, value in BUILT_IN_SAMPLING.items():
        option = words[words.index(f"--{name.replace('_', '-')} ") :]
        assert f"files' value, else {value}." in option[:300] or f"model's files, else {value}." in option[:300], name
