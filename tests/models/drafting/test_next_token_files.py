"""Next-token blocks as files hold them, through the numpy twin, against transformers' layers; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from architecture_case import FORMS, Form
from architectures import MAX_RELATIVE_ERROR
from engine.core.core_runs import run, tokens
from handmade_checkpoint import stored
from models.drafting.next_token_files import FAMILIES, write_file
from parity_table.stored import store_folder
from realizar.backends.base import ModelSource
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.cpu.weights.pack import FloatMatrix
from realizar.backends.select import resolve_model
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import load_core
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.next_token import is_next_token_file, with_shortlist
from realizar.models.registry import build_next_token_block, build_spec
from realizar.models.spec import ModelSpec
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from reference_model import ReferenceModel
from reference_tensors import load_tensors

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")

OPTIONS: dict[str, Any] = {
    "device": "cpu", "threads": 1, "context_length": 96, "kv_cache_bytes": 4 << 20, "max_running": 2,
}  # fmt: skip


def block_of(checkpoint: Checkpoint) -> ModelSpec:
    block = build_next_token_block(checkpoint)
    assert block is not None
    check_tensors(block, checkpoint)
    return block


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_beside_a_model_whose_matrices_a_method_stores(name: str, tmp_path: Path) -> None:
    file = write_file(name, tmp_path / "plain", "safetensors")
    store_folder(file.path, "NVFP4 of ModelOpt", tmp_path / "stored")
    plain, packed = open_checkpoint(file.path), open_checkpoint(tmp_path / "stored")
    assert any("mtp." in each or ".2." in each for each in packed.tensors if each.endswith("weight_scale_2"))
    expected = load_tensors(block_of(plain), plain)
    found = load_tensors(block_of(packed), packed)
    assert found.keys() == expected.keys()
    for each, values in expected.items():
        np.testing.assert_array_equal(found[each], values)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_computes_what_transformers_layers_compute(name: str, form: Form, tmp_path: Path) -> None:
    file = write_file(name, tmp_path, form)
    checkpoint = open_checkpoint(file.path)
    spec, block = build_spec(checkpoint), block_of(checkpoint)
    check_tensors(spec, checkpoint)
    states = ReferenceModel(spec, load_tensors(spec, checkpoint)).hidden(file.token_ids)
    before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])
    found = ReferenceModel(block, load_tensors(block, checkpoint)).logits(file.token_ids, given=before)
    errors = np.linalg.norm(found - file.logits, axis=1) / np.linalg.norm(file.logits, axis=1)
    assert errors.max() <= MAX_RELATIVE_ERROR


def test_a_file_of_a_block_alone(tmp_path: Path) -> None:
    whole = block_of(open_checkpoint(write_file("qwen35", tmp_path / "a", "gguf").path))
    alone = open_checkpoint(write_file("qwen35", tmp_path / "b", "gguf", alone=True).path)
    assert is_next_token_file(alone)
    assert block_of(alone) == replace(whole, ignored_tensors=block_of(alone).ignored_tensors)


def test_loading_is_strict_both_ways(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_file("glm4moe", tmp_path, "gguf").path)
    layers = len(build_spec(checkpoint).layers)
    name = f"blk.{layers}.attn_q.weight"
    for changed, message in (
        ({key: value for key, value in checkpoint.tensors.items() if key != name}, f"missing {name}"),
        ({**checkpoint.tensors, f"{name}x": stored(f"{name}x", (4,))}, f"unexpected {name}x"),
        ({**checkpoint.tensors, name: stored(name, (4, 4))}, f"misshaped {name}"),
    ):
        with pytest.raises(CheckpointError, match=message):
            block_of(replace(checkpoint, tensors=changed))


def test_what_is_not_there_or_not_known_does_not_draft(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_file("qwen35", tmp_path, "gguf").path)
    layers = len(build_spec(checkpoint).layers)
    dropped = {key: value for key, value in checkpoint.tensors.items() if not key.startswith(f"blk.{layers}.")}
    assert build_next_token_block(replace(checkpoint, tensors=dropped)) is None
    several = {**checkpoint.metadata, "qwen35.block_count": layers + 2, "qwen35.nextn_predict_layers": 2}
    with pytest.raises(UnsupportedModelError, match="it has 2 next-token blocks, and models with one can draft"):
        build_next_token_block(replace(checkpoint, metadata=several))


def answers(core: EngineCore) -> list[list[int]]:
    try:
        for index in range(2):
            core.add(Request(str(index), tuple(range(7 + index, 47)), SamplingParams(temperature=index, seed=3), 30))
        found = run(core)
        return [tokens(found[str(index)]) for index in range(2)]
    finally:
        core.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_drafts_by_the_block_of_the_file(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_file(name, tmp_path, "gguf").path)
    plain = load_core(checkpoint, EngineConfig(**OPTIONS))
    drafted = load_core(checkpoint, EngineConfig(**OPTIONS, drafter="auto"))
    assert (plain.capacity.num_drafts, drafted.capacity.num_drafts) == (0, 3)
    assert drafted.capacity.weight_bytes < 2 * plain.capacity.weight_bytes
    assert answers(drafted) == answers(plain)
    assert drafted.scheduler.counts.draft_tokens > 30


def test_auto_without_a_block_is_lookup(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_file("qwen35", tmp_path, "gguf").path)
    layers = len(build_spec(checkpoint).layers)
    kept = {key: value for key, value in checkpoint.tensors.items() if not key.startswith(f"blk.{layers}.")}
    core = load_core(replace(checkpoint, tensors=kept), EngineConfig(**OPTIONS, drafter="auto"))
    assert (core.config.drafter, core.config.speculative_tokens, core.capacity.num_drafts) == ("lookup", 0, 0)
    core.close()


def test_a_shortlist_is_the_first_rows_of_the_models_head(tmp_path: Path) -> None:
    """The block drafts the first ids alone, reads all, and packs no row of the head again; texts are the same."""
    file = write_file("qwen35", tmp_path, "gguf")
    checkpoint = open_checkpoint(file.path)
    spec, block = build_spec(checkpoint), block_of(checkpoint)
    assert with_shortlist(block, 66) is block
    short = with_shortlist(block, 64)
    check_tensors(short, checkpoint)
    given = np.random.default_rng(2).standard_normal((8, spec.hidden_size)).astype(np.float32)
    whole, part = (
        ReferenceModel(each, load_tensors(each, checkpoint)).logits(range(100, 108), given=given)
        for each in (block, short)
    )
    np.testing.assert_array_equal(part, whole[:, :64])
    config = resolve_model(checkpoint, EngineConfig(**OPTIONS, speculative_tokens=3))[1]
    backends = [CPUBackend(), CPUBackend()]
    backends[0].load(spec, checkpoint, config, {"drafter": ModelSource(short, checkpoint)})
    backends[1].load(spec, checkpoint, config)
    assert backends[0]._drafter is not None
    drafter = backends[0]._drafter.backend
    assert isinstance(drafter, CPUBackend)
    own, head = drafter.model.weights.matrices[short.head.weight], backends[0].model.weights.matrices[spec.head.weight]
    assert isinstance(own, FloatMatrix)
    assert isinstance(head, FloatMatrix)
    assert np.shares_memory(own.weights, head.weights)
    assert (own.out_features, drafter.model.weights.size_bytes) == (64, packed_bytes(block, spec, drafter))
    drafted, plain = (EngineCore(each, spec, config) for each in backends)
    assert answers(drafted) == answers(plain)
    assert drafted.scheduler.counts.draft_tokens > 30


def packed_bytes(block: ModelSpec, spec: ModelSpec, drafter: CPUBackend) -> int:
    """Of the block's matrices, but for those of the model."""
    sources = set(spec.tensors.values())
    return sum(
        drafter.model.weights.matrices[each.weight].size_bytes
        for each in block.matrices()
        if block.tensors[each.weight] not in sources
    )
