"""A head on a model's states on a GPU, or its kernels interpreted: its logits are the twin's, and texts the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

import torch

from backends.cuda.cuda_runs import new_backend
from backends.cuda.matmul.packed_matmuls import run_packed
from backends.cuda.step.block_runs import Run, texts_of
from backends.draft_models import assistant_head, dflash_head, eagle3_head, next_token_block
from random_models import Recipe, random_tokens
from realizar.backends.base import ModelSource
from realizar.backends.cuda.plan import beside_drafter
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.weight_tensors import WeightTensors
from realizar.config import EngineConfig
from realizar.engine.draft_models import open_drafter
from realizar.models.generated.generate import generated_checkpoint
from realizar.models.registry import build_spec
from resolving import resolved
from wider import wider

RECIPE = Recipe(
    hidden_size=64, feed_forward_size=96, head_size=32, num_heads=2, num_kv_heads=1, vocab_size=48, windows=(None,),
    weights="F32",
)  # fmt: skip
HYBRID = replace(RECIPE, windows=(None, None), recurrent=("delta",), value_size=16, lacking=("feed_forward",))
DEEP = replace(RECIPE, windows=(None, None, None))
LENDING = replace(RECIPE, windows=(40, None, None))
HEADS = {
    "attention": (RECIPE, next_token_block(RECIPE, of_state=0.5)),
    "mixture": (replace(RECIPE, experts=4), next_token_block(replace(RECIPE, experts=4), of_state=0.5)),
    "hybrid": (HYBRID, next_token_block(HYBRID, of_state=0.5)),
    "dflash": (DEEP, dflash_head(DEEP)), "eagle3": (DEEP, eagle3_head(DEEP, 0.01)),
    "random eagle3": (DEEP, eagle3_head(DEEP, None, normed=False)),
    "assistant": (LENDING, assistant_head(LENDING, 0.01)), "random assistant": (LENDING, assistant_head(LENDING, None)),
}  # fmt: skip
UNFORESEEN = "dflash", "random eagle3", "random assistant"
CONFIG = EngineConfig(
    threads=1, max_running=2, max_step_tokens=24, kv_cache_bytes=8 << 20, context_length=96, speculative_tokens=2,
    prompt_lookup_min=100, prompt_lookup_max=100, graphs=False, block_size=16,
)  # fmt: skip


@pytest.mark.parametrize("name", wider(HEADS, "attention", "dflash", "eagle3", "random assistant"))
def test_logits_are_those_of_the_twin_and_texts_those_without_drafts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second prompt is read in chunks, and the third begins with its first block."""
    (recipe, head), long = HEADS[name], random_tokens(HEADS[name][0], 34, 1)
    prompts = [random_tokens(recipe, 9, 0), long, [*long[:16], 3, 4]]
    expected = texts_of(Run(recipe, CONFIG, prompts, 9)).texts
    found = texts_of(Run(recipe, CONFIG, prompts, 9, head), monkeypatch)
    assert found.texts == expected
    assert texts_of(Run(recipe, CONFIG, prompts, 9, head)) == replace(found, errors=[])  # drafts stay on the device
    assert found.counts.draft_tokens > found.counts.accepted_tokens >= (name not in UNFORESEEN)
    assert (found.counts.prefix_cache_hits > 0) is (name != "hybrid")  # whose states no snapshot keeps there
    fewest = {"dflash": 15, "assistant": 12, "random assistant": 25}  # of blocks, or of drafts; else of tokens
    assert len(found.errors) > fewest.get(name, 64)
    assert max(found.errors) < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="the twins of packed matmuls stand in for a GPU's")
@pytest.mark.parametrize("name", ["block", "dflash", "eagle3"])
def test_packed_weights_of_other_columns_than_the_streams(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The halves of a block's first matrix are packed, as files have it; EAGLE-3 reads two and three times as many."""
    recipe = replace(RECIPE, hidden_size=256, feed_forward_size=512, num_heads=8, weights="Q4_K")
    head = next_token_block(recipe, of_state=None)
    if name != "block":
        recipe = replace(recipe, windows=(None, None, None))
        head = eagle3_head(recipe, None) if name == "eagle3" else dflash_head(recipe)
    launched = run_packed(monkeypatch)
    prompts = [random_tokens(recipe, 20, 0)]
    found = texts_of(Run(recipe, CONFIG, prompts, 4, head), monkeypatch)
    assert found.counts.draft_tokens > 0
    assert launched.names
    assert len(found.errors) > (0 if name == "dflash" else 20)
    assert max(found.errors) < 0.02


def test_a_block_of_the_models_own_file_takes_its_embedding() -> None:
    checkpoint = generated_checkpoint("tiny-delta-mtp", "q8_0", 1.0)
    spec = build_spec(checkpoint)
    config = resolved(spec, checkpoint, replace(CONFIG, drafter="auto"), "cuda")
    others, backend = open_drafter(checkpoint, config), new_backend()
    backend.load(spec, checkpoint, config, others)
    assert backend._drafter is not None
    drafter = backend._drafter.backend
    assert isinstance(drafter, CUDABackend)
    assert drafter.model.weights.embedding is backend.model.weights.embedding
    backend.shutdown()
    named, copied = (_with_embedding(others["drafter"], copies=flag) for flag in (False, True))
    lent, lent_too, own = (
        beside_drafter(each, spec, checkpoint, config).fixed_bytes for each in (others["drafter"], named, copied)
    )
    assert lent == lent_too == own - WeightTensors(spec, checkpoint).table_bytes


def _with_embedding(drafter: ModelSource, *, copies: bool) -> ModelSource:
    """In a checkpoint of its own, which has the embedding by another name, or a copy of it."""
    spec, tensors = drafter.spec, drafter.checkpoint.tensors
    stored = tensors[spec.tensors[spec.embedding].name]
    lent = replace(stored, name="lent", data=stored.data.copy() if copies else stored.data)
    source = replace(spec.tensors[spec.embedding], name="lent")
    own = replace(spec, tensors={**spec.tensors, spec.embedding: source})
    return ModelSource(own, replace(drafter.checkpoint, tensors={**tensors, "lent": lent}))
