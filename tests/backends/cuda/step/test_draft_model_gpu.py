"""Drafts of every kind on a GPU, with graphs and one order of sums: the same tokens, whatever runs beside."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.cuda_runs import new_backend  # noqa: E402
from backends.cuda.step.block_runs import Run, texts_of  # noqa: E402
from backends.draft_models import assistant_head, dflash_head, eagle3_head, first_layers, itself, next_token_block  # noqa: E402
from engine.core.draft_kinds import COUNT, KINDS, DraftKinds, random_requests  # noqa: E402
from random_models import Recipe, random_tokens  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402

pytestmark = pytest.mark.gpu

RECIPE = Recipe(128, 8, 2, hidden_size=1024, feed_forward_size=2816, weights="Q8_0", windows=(None, 40, None))
BLOCKED = replace(RECIPE, windows=(None,), weights="Q4_K")
HEAD_RECIPES = {
    "attention": BLOCKED,
    "mixture": replace(BLOCKED, feed_forward_size=512, experts=8, parts=("shared", "shared_gate")),
    "hybrid": replace(
        BLOCKED, windows=(None, None), recurrent=("delta",), key_size=128, value_size=128, lacking=("feed_forward",),
        parts=("qk_norm", "output_gate"),
    ),
    "dflash": replace(BLOCKED, windows=(None, None, None)),
    "eagle3": replace(BLOCKED, windows=(None, None, None)),
    "assistant": replace(BLOCKED, windows=(40, None, None)),
}  # fmt: skip
CONFIG = EngineConfig(
    max_running=16, max_step_tokens=256, kv_cache_bytes=64 << 20, context_length=512, speculative_tokens=4,
    prompt_lookup_min=100, prompt_lookup_max=100, batch_invariant=True,
)  # fmt: skip
PROMPTS = [random_tokens(RECIPE, 7 + 37 * index, index) for index in range(10)]


@pytest.fixture(scope="module")
def kinds() -> Iterator[DraftKinds]:
    made = DraftKinds(new_backend, "cuda", batch_invariant=True)
    yield made
    made.close()


def test_texts_are_the_same_with_any_drafter() -> None:
    """One order of sums makes them equal to the last token, and a model's own drafts of greedy rows right."""
    expected, accepted = texts_of(Run(RECIPE, CONFIG, PROMPTS, 60)).texts, {}
    for name, drafter in (("itself", itself(RECIPE)), ("first layer", first_layers(RECIPE, 1))):
        found = texts_of(Run(RECIPE, CONFIG, PROMPTS, 60, drafter))
        assert found.texts == expected
        accepted[name] = found.counts.accepted_tokens
    assert accepted["itself"] >= 7 * 47  # of seven greedy rows all drafts, four of each five tokens
    assert accepted["itself"] > accepted["first layer"] > 0


@pytest.mark.parametrize("name", HEAD_RECIPES)
def test_a_heads_logits_are_the_twins_and_texts_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four-bit weights, in the layouts of the matmuls: products of halves are as exact as those allow.

    A few tokens of a mixture go through other experts, where two are nearly as likely.
    """
    recipe = HEAD_RECIPES[name]
    made = {
        "dflash": dflash_head, "eagle3": partial(eagle3_head, of_state=None),
        "assistant": partial(assistant_head, of_state=None),
    }  # fmt: skip
    head = made.get(name, partial(next_token_block, of_state=None))(recipe)
    expected = texts_of(Run(recipe, CONFIG, PROMPTS, 40)).texts
    found = texts_of(Run(recipe, CONFIG, PROMPTS, 40, head), monkeypatch)
    assert found.texts == expected
    assert found.counts.draft_tokens > 100
    assert len(found.errors) > (300 if name in ("dflash", "assistant") else 2000)  # of blocks, drafts or tokens
    assert sorted(found.errors)[int(0.95 * len(found.errors))] < 0.02
    assert name == "mixture" or max(found.errors) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(kind: str, kinds: DraftKinds) -> None:
    kinds.check(kind, random_requests(COUNT))


def test_depths_that_are_measured_change_no_token(kinds: DraftKinds) -> None:
    kinds.check("block", random_requests(COUNT), measures=True)
