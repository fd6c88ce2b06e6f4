"""Sampling parameters as options."""

from __future__ import annotations

from dataclasses import fields

import pytest
from cyclopts import App, CycloptsError

from realizar.cli.sampling_options import SamplingOptions, describe, parse_assignments
from realizar.errors import InvalidRequestError
from realizar.sampling_params import SamplingParams

# What makes no sense for one answer in a terminal, or takes token ids.
NOT_OPTIONS = {"dry_sequence_breakers", "logit_bias", "logprobs", "prompt_logprobs", "stop_token_ids", "n"}


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
