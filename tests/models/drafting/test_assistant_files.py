"""Gemma 4's assistants as files hold them, through the numpy twin, against transformers; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from architecture_case import FORMS, Form
from architectures import MAX_RELATIVE_ERROR
from handmade_checkpoint import stored
from models.drafting.assistant_files import MODELS, PLACES, AssistantFile, config_of, write_assistant
from models.drafting.dflash_files import write_dflash
from models.drafting.opened_files import opened_beside
from models.drafting.test_next_token_files import OPTIONS, answers
from realizar.backends.select import plan_memory, refusal, resolve_model
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.draft_models import open_drafter
from realizar.engine.loading import load_core
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.drafters.assistant import build_assistant
from realizar.models.mixers import SharedAttention
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec
from reference_model import ReferenceModel, State
from reference_tensors import load_tensors

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")


def opened(file: AssistantFile, **changed: Any) -> tuple[ModelSpec, ModelSpec, Checkpoint]:
    return opened_beside(build_assistant, file, changed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("row", "clusters"), [(MODELS[0], False), (MODELS[1], True)])
def test_drafts_are_what_transformers_drafts(row: str, clusters: bool, form: Form, tmp_path: Path) -> None:
    """One after another, of the ids that transformers scores."""
    file = write_assistant(row, tmp_path, form, clusters=clusters)
    model, spec, checkpoint = opened(file)
    of_model, twin = open_checkpoint(file.model_path), ReferenceModel(spec, load_tensors(spec, checkpoint))
    reference = ReferenceModel(model, load_tensors(model, of_model))
    for place, (token_ids, expected) in file.chains.items():
        kept: State = {}
        state = reference.hidden(file.token_ids[:place], kept)[-1:]
        for token_id, logits in zip(token_ids, expected, strict=True):
            hidden = twin.hidden([token_id], kept, state)
            scored, state = np.isfinite(logits), twin.handed_on(hidden)
            assert int(scored.sum()) == (40 if clusters else len(logits))
            error = twin.head(hidden)[0][scored] - logits[scored]
            assert np.linalg.norm(error) <= MAX_RELATIVE_ERROR * np.linalg.norm(logits[scored])
    assert len(file.chains) == len(PLACES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("row", MODELS)
def test_an_assistant_beside_its_model_changes_no_token(row: str, form: Form, tmp_path: Path) -> None:
    file = write_assistant(row, tmp_path, form)
    checkpoint = open_checkpoint(file.model_path)
    plain = load_core(checkpoint, EngineConfig(**OPTIONS))
    drafted = load_core(checkpoint, EngineConfig(**OPTIONS, drafter=str(file.path)))
    assert (drafted.capacity.num_drafts, drafted.capacity.spare_positions) == (3, 0)
    assert drafted.capacity.num_blocks == plain.capacity.num_blocks
    assert answers(drafted) == answers(plain)
    assert drafted.scheduler.counts.draft_tokens > 30


def test_a_context_within_the_window_has_one_group(tmp_path: Path) -> None:
    """Which layers had a window is known all the same: their keys have other sizes."""
    file = write_assistant(MODELS[0], tmp_path, "gguf")
    of_model = open_checkpoint(file.model_path)
    model = build_spec(of_model, 40)
    spec, _ = build_assistant(open_checkpoint(file.path), model, of_model)
    assert {group.window for group in spec.cache_groups()} == {None}
    sources = [reads.source for _, reads in spec.all_attentions() if isinstance(reads, SharedAttention)]
    kept = dict(model.attentions())
    assert [kept[source].head_size for source in sources] == [24, 24, 48]


def test_a_form_of_its_own_goes_beside_either_form_of_the_model(tmp_path: Path) -> None:
    """A folder drafts for a GGUF file as the GGUF file of the same assistant does."""
    files = [write_assistant(MODELS[0], tmp_path / form, form) for form in FORMS]
    checkpoint = open_checkpoint(files[1].model_path)
    found = []
    for file in files:
        core = load_core(checkpoint, EngineConfig(**OPTIONS, drafter=str(file.path)))
        found.append((answers(core), core.scheduler.counts.accepted_by_place))
    assert found[0] == found[1]


def test_plans_have_its_weights_and_no_blocks(tmp_path: Path) -> None:
    file = write_assistant(MODELS[0], tmp_path, "gguf")
    checkpoint, config = open_checkpoint(file.model_path), EngineConfig(**OPTIONS, drafter=str(file.path))
    spec, resolved = resolve_model(checkpoint, config)
    others = open_drafter(checkpoint, resolved)
    alone, both = (plan_memory(spec, checkpoint, resolved, 1 << 30, each) for each in ({}, others))
    assert alone.beside_bytes == 0
    head_bytes = 4 * spec.vocab_size * others["drafter"].spec.hidden_size
    assert head_bytes < both.beside_bytes < 2 * alone.weight_bytes + alone.workspace_bytes
    assert both.contexts == alone.contexts
    core = load_core(checkpoint, config)
    planned = resolve_model(checkpoint, replace(config, drafter="off"))[1]
    own = core.capacity.weight_bytes - plan_memory(spec, checkpoint, planned, 1 << 30).weight_bytes
    assert head_bytes < own < both.beside_bytes
    core.close()


@pytest.mark.parametrize("form", FORMS)
def test_loading_is_strict_both_ways(form: Form, tmp_path: Path) -> None:
    file = write_assistant(MODELS[0], tmp_path, form)
    tensors = open_checkpoint(file.path).tensors
    name = next(each for each in tensors if "attn_q." in each or "q_proj" in each)
    key = name.replace("attn_q", "attn_k").replace("q_proj", "k_proj")
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, f"missing {name}"),
        ({**tensors, key: stored(key, (4, 4))}, f"unexpected {key}"),
        ({**tensors, name: stored(name, (4, 4))}, f"misshaped {name}"),
    ):
        with pytest.raises(CheckpointError, match=message):
            opened(file, tensors=changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backbone_hidden_size": None}, "'backbone_hidden_size': missing"),
        ({"use_ordered_embeddings": 1}, "'use_ordered_embeddings': expected true or false"),
        ({"text_hidden_size_per_layer_input": 4}, "'hidden_size_per_layer_input': unsupported value 4"),
        ({"text_vocab_size_per_layer_input": 4}, "'vocab_size_per_layer_input': unsupported value 4"),
        ({"text_enable_moe_block": True}, "'enable_moe_block': unsupported value True"),
        ({"text_use_double_wide_mlp": True}, "'use_double_wide_mlp': unsupported value True"),
        ({"text_num_kv_shared_layers": 2}, "'num_kv_shared_layers': unsupported value 2"),
        ({"text_use_bidirectional_attention": "all"}, "'use_bidirectional_attention': unsupported value 'all'"),
        ({"text_scale_of_drafts": 3}, "'scale_of_drafts': unsupported value 3"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_assistant(MODELS[0], tmp_path, "safetensors")
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        opened(file, metadata={"config": config_of(file, **changed)})


@pytest.mark.parametrize("form", FORMS)
def test_it_is_no_model_by_itself_and_either_device_runs_it(form: Form, tmp_path: Path) -> None:
    file = write_assistant(MODELS[0], tmp_path, form)
    with pytest.raises(UnsupportedModelError, match="it drafts for another model, as --drafter, and runs beside it"):
        build_spec(open_checkpoint(file.path))
    _, spec, _ = opened(file)
    assert refusal(spec, "cpu") is refusal(spec, "cuda") is None


def test_a_model_of_another_kind_or_size_is_refused_by_name(tmp_path: Path) -> None:
    file = write_assistant(MODELS[0], tmp_path / "a", "gguf")
    other = write_assistant(MODELS[1], tmp_path / "b", "gguf")
    qwen = write_dflash(tmp_path, "gguf")
    for path, message in (
        (other.model_path, "layer 0 of the assistant reads other keys than layer 2 of the model has: 2 of 24 numbers"),
        (qwen.model_path, "drafter.gguf: its model has no layers of the kinds whose keys it reads"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            load_core(open_checkpoint(path), EngineConfig(**OPTIONS, drafter=str(file.path)))
