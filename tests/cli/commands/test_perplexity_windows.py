"""The arithmetic of `realizar perplexity`."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.cli.commands.score import compared, summary, windows
from realizar.outputs import TokenLogprobs


@given(st.integers(2, 700), st.integers(2, 64))
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(num_tokens: int, size: int) -> None:
    scored: list[int] = []
    for start, first in windows(num_tokens, size):
        positions = range(first, min(start + size, num_tokens))
        assert len(positions) > 0
        assert start == 0 or first - start >= size // 2
        scored += positions
    assert scored == list(range(1, num_tokens))


def test_uniform_predictions_have_the_vocabulary_as_perplexity() -> None:
    perplexity, error = summary([math.log(50)] * 100)
    assert perplexity == pytest.approx(50)
    assert error == pytest.approx(0, abs=1e-9)


def test_standard_error_is_that_of_repeated_draws() -> None:
    rng = random.Random(7)
    draws = [summary([rng.gauss(1.0, 0.5) for _ in range(400)]) for _ in range(400)]
    mean = sum(perplexity for perplexity, _ in draws) / len(draws)
    spread = math.sqrt(sum((perplexity - mean) ** 2 for perplexity, _ in draws) / len(draws))
    claimed = sum(error for _, error in draws) / len(draws)
    assert claimed == pytest.approx(spread, rel=0.15)


def test_two_models_are_compared_token_by_token() -> None:
    """Far apart from token to token, and always by a factor of two from each other."""
    ours = [TokenLogprobs(1, -float(place), 1, ((1, -0.1),)) for place in range(1, 9)]
    theirs = [TokenLogprobs(1, -place - math.log(2), 1, ((place % 2, -0.1),)) for place in range(1, 9)]
    found = compared(ours, theirs)
    assert found["perplexity"] == pytest.approx(2 * math.exp(4.5))
    assert (found["ratio"], found["ratio_error"]) == (pytest.approx(0.5), pytest.approx(0, abs=1e-9))
    assert found["same_top"] == 0.5
