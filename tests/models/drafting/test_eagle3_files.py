"""EAGLE-3 heads as files hold them, through the numpy twin, against transformers' parts; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from architectures import MAX_RELATIVE_ERROR
from handmade_checkpoint import stored
from models.drafting.eagle3_files import FORMS, HeadCase, HeadFile, HeadForm, write_head
from models.drafting.opened_files import opened_beside
from models.drafting.test_next_token_files import OPTIONS, answers
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.cli.options.loading import _read_by_plans
from realizar.config import EngineConfig
from realizar.engine.loading import load_core
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.drafters.eagle3 import build_eagle3, is_eagle3
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from tiny_model import write_tiny_model

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")

CASES = {
    "part of the ids": HeadCase(), "more norms": HeadCase(normed=True), "all ids": HeadCase(whole=True),
    "usual layers": HeadCase(names_layers=False),
}  # fmt: skip


def opened(file: HeadFile, **changed: Any) -> tuple[ModelSpec, ModelSpec, Checkpoint]:
    return opened_beside(build_eagle3, file, changed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_a_head_computes_what_the_papers_layer_computes(name: str, form: HeadForm, tmp_path: Path) -> None:
    file = write_head(CASES[name], tmp_path, form)
    assert is_eagle3(open_checkpoint(file.path))
    model, spec, checkpoint = opened(file)
    assert list(spec.head_ids or range(spec.vocab_size)) == file.ids
    twin, of_model = ReferenceModel(spec, load_tensors(spec, checkpoint)), open_checkpoint(file.model_path)
    streams = ReferenceModel(model, load_tensors(model, of_model)).streams(file.token_ids)
    states = twin.fused(streams)
    before = np.concatenate([np.zeros_like(states[:1]), states[:-1]])
    found = twin.logits(file.token_ids, given=before)
    errors = np.linalg.norm(found - file.logits, axis=1) / np.linalg.norm(file.logits, axis=1)
    assert errors.max() <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("form", FORMS)
def test_loading_is_strict_both_ways(form: HeadForm, tmp_path: Path) -> None:
    file = write_head(HeadCase(), tmp_path, form)
    tensors = open_checkpoint(file.path).tensors
    name = next(each for each in tensors if "attn_q" in each or "q_proj" in each)
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, f"missing {name}"),
        ({**tensors, f"{name}x": stored(f"{name}x", (4,))}, f"unexpected {name}x"),
        ({**tensors, name: stored(name, (4, 4))}, f"misshaped {name}"),
        ({**tensors, "d2t": stored("d2t", (70,))}, "tensor 'd2t': expected a list of I64, found F32"),
        ({**tensors, "d2t": of_ids(tensors["d2t"], lambda ids: ids * 0 + 130)}, "its ids are not distinct ones of the"),
        ({**tensors, "d2t": of_ids(tensors["d2t"], lambda ids: ids - 200)}, "its ids are not distinct ones of the"),
    ):
        with pytest.raises(CheckpointError, match=message):
            opened(file, tensors=changed)


def of_ids(tensor: Any, change: Callable[[Any], Any]) -> Any:
    return replace(tensor, data=change(np.array(tensor.data).view(np.int64)).view(np.uint8))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_hidden_layers": 2}, UnsupportedModelError, "'num_hidden_layers': unsupported value 2"),
        ({"draft_vocab_size": 71}, CheckpointError, "it has 70 numbers, and 'draft_vocab_size' is 71"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, UnsupportedModelError, "use_aux_hidden_state'"),
        ({"eagle_config": {"parallel_draft_step": 4}}, UnsupportedModelError, "does not know the key"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, CheckpointError, "expected a list of 3, one per stream"),
        ({"layer_types": ["sliding_attention"]}, UnsupportedModelError, "'layer_types': unsupported value"),
        ({"bias": True}, UnsupportedModelError, "'bias': unsupported value True"),
        ({"vocab_size": 132}, CheckpointError, "misshaped embed_tokens.weight"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    changed: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    file = write_head(HeadCase(), tmp_path, "sglang")
    config = json.loads((file.path / "config.json").read_text())
    with pytest.raises(error, match=message):
        opened(file, metadata={"config": {**config, **changed}})


@pytest.mark.parametrize("form", FORMS)
def test_a_head_of_a_part_of_the_ids_is_its_own(form: HeadForm, tmp_path: Path) -> None:
    file = write_head(HeadCase(), tmp_path, form)
    tensors, name = dict(open_checkpoint(file.path).tensors), "output.weight" if form == "gguf" else "lm_head.weight"
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor '{name}': missing, for the ids of tensor 'd2t'"):
        opened(file, tensors=tensors)


@pytest.mark.parametrize("form", FORMS)
def test_a_head_of_all_ids_may_be_the_models(form: HeadForm, tmp_path: Path) -> None:
    file = write_head(HeadCase(whole=True), tmp_path, form)
    tensors, name = dict(open_checkpoint(file.path).tensors), "output.weight" if form == "gguf" else "lm_head.weight"
    del tensors[name]
    _, spec, checkpoint = opened(file, tensors=tensors)
    assert checkpoint.tensors[spec.tensors[spec.head.weight].name] is not None
    model = open_checkpoint(file.model_path)
    np.testing.assert_array_equal(checkpoint.tensors[name].data, model.tensors[name].data)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["part of the ids", "more norms", "all ids"])
def test_a_head_beside_its_model_changes_no_token(name: str, form: HeadForm, tmp_path: Path) -> None:
    file = write_head(CASES[name], tmp_path, form)
    checkpoint = open_checkpoint(file.model_path)
    plain = load_core(checkpoint, EngineConfig(**OPTIONS))
    drafted = load_core(checkpoint, EngineConfig(**OPTIONS, drafter=str(file.path)))
    assert (plain.capacity.num_drafts, drafted.capacity.num_drafts) == (0, 3)
    assert answers(drafted) == answers(plain)
    assert drafted.scheduler.counts.draft_tokens > 30


def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny.gguf")
    model, file = open_checkpoint(tmp_path / "tiny.gguf"), write_head(HeadCase(), tmp_path, "gguf")
    head = open_checkpoint(file.path)
    own = {key: value for key, value in model.metadata.items() if key.startswith("tokenizer.")}
    own["tokenizer.ggml.tokens"] = list(own["tokenizer.ggml.tokens"])[::-1]
    tensors = [NewTensor(name, each.ggml_type, each.shape, each.data) for name, each in head.tensors.items()]
    write_gguf(tmp_path / "other.gguf", {**head.metadata, **own}, tensors)
    with pytest.raises(UnsupportedModelError, match=r"the drafter other\.gguf has another vocabulary"):
        load_core(model, EngineConfig(**OPTIONS, drafter=str(tmp_path / "other.gguf")))


def test_a_plan_of_what_is_not_fetched_reads_the_ids(tmp_path: Path) -> None:
    file = write_head(HeadCase(), tmp_path, "gguf")
    ids = open_checkpoint(file.path).tensors["d2t"]
    assert list(_read_by_plans(ids)) == [(file.path, ids.offset, ids.offset + 8 * len(file.ids))]


@pytest.mark.parametrize("form", FORMS)
def test_it_is_no_model_by_itself(form: HeadForm, tmp_path: Path) -> None:
    file = write_head(HeadCase(), tmp_path, form)
    with pytest.raises(UnsupportedModelError, match="it drafts for another model, as --drafter, and runs beside it"):
        build_spec(open_checkpoint(file.path))
