"""Small models: which of them stand for a model, and how far their outcome may be from what is recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.verdict.small_runs import exact_logprobs, run_on_cpu
from random_models import Recipe, random_model
from realizar.backends.verdict import compare
from realizar.backends.verdict.compare import NoComparisonError, difference, recorded
from realizar.backends.verdict.small_models import SMALL_MODELS, SmallModel, small_models_like
from realizar.backends.verdict.small_steps import Seen
from realizar.checkpoint.checkpoint import Checkpoint

WINDOW = SmallModel("tiny-window", "q4_k_m")


@pytest.fixture(scope="module")
def seen() -> tuple[Checkpoint, Seen]:
    """What the CPU gives, and by which model."""
    spec, checkpoint = WINDOW.make()
    return checkpoint, run_on_cpu(spec, checkpoint)


def test_the_cpu_computes_what_is_recorded(seen: tuple[Checkpoint, Seen]) -> None:
    assert difference(WINDOW, *seen) is None


@pytest.mark.full
@pytest.mark.parametrize("model", SMALL_MODELS, ids=str)
def test_the_cpu_computes_what_is_recorded_of_each(model: SmallModel) -> None:
    spec, checkpoint = model.make()
    assert difference(model, checkpoint, run_on_cpu(spec, checkpoint)) is None


def test_what_is_recorded_is_exact(seen: tuple[Checkpoint, Seen]) -> None:
    """The twin in float64; a model with fewer steps is not to be had."""
    spec, checkpoint = WINDOW.make()
    exact = recorded(replace(seen[1], logprobs=exact_logprobs(spec, checkpoint)))["logprobs"]
    expected = compare._expected()[f"{WINDOW}/logprobs"]
    np.testing.assert_allclose(exact.astype(np.float64), expected.astype(np.float64), atol=0.01)


def test_differences_are_named(seen: tuple[Checkpoint, Seen]) -> None:
    checkpoint, whole = seen
    step = "in a step of 79 tokens and 2 rows of tiny-window of q4_k_m"

    def said(**changed: np.ndarray) -> str | None:
        return difference(WINDOW, checkpoint, replace(whole, **changed))

    assert said(logprobs=np.roll(whole.logprobs, 1, axis=0)) == f"3 nats apart {step}"
    wrong = whole.logprobs.copy()
    wrong[70:79] = wrong[[0]]  # one row
    assert said(logprobs=wrong).endswith(f"nats apart {step}")  # type: ignore[union-attr]
    wrong = whole.logprobs.copy()
    wrong[-1] = wrong[-2]  # a decode alone
    assert said(logprobs=wrong).endswith("in a step of 1 tokens and 1 rows of tiny-window of q4_k_m")  # type: ignore[union-attr]
    wrong = whole.logprobs.copy()
    wrong[3, 32] = np.nan
    assert said(logprobs=wrong) == f"values that are not finite {step}"
    assert said(greedy=np.column_stack([whole.greedy[:, 0], whole.greedy[:, 1] ^ 1])) == (
        "sampled tokens that are not the most probable in tiny-window of q4_k_m"
    )
    assert said(drawn=whole.drawn[::-1]) == "0% of draws are the same in tiny-window of q4_k_m"


def test_another_model_than_was_recorded_is_not_compared(seen: tuple[Checkpoint, Seen]) -> None:
    with pytest.raises(NoComparisonError, match="tiny-moe of q4_k_m is not the model that was recorded"):
        difference(SmallModel("tiny-moe", "q4_k_m"), *seen)


def test_models_have_the_layers_of_the_one_that_is_loaded() -> None:
    def like(recipe: Recipe) -> list[str]:
        return list(map(str, small_models_like(*random_model(recipe))))

    base = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="Q8_0", windows=(None, None))
    assert like(base) == ["small of q4_k_m"]
    assert like(replace(base, weights="BF16")) == ["small of bf16"]
    assert like(replace(base, windows=(None, 40))) == ["small of q4_k_m", "tiny-window of q4_k_m"]
    assert like(replace(base, experts=4, recurrent=("delta", None))) == [
        "small of q4_k_m", "tiny-moe of q4_k_m", "tiny-delta of q4_k_m",
    ]  # fmt: skip
    assert like(replace(base, recurrent=("convolution", None))) == ["small of q4_k_m", "tiny-convolution of q4_k_m"]
