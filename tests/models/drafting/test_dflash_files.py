"""DFlash drafters as files hold them, through the numpy twin, against torch; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from architecture_case import FORMS, Form
from architectures import MAX_RELATIVE_ERROR
from handmade_checkpoint import stored
from models.drafting.dflash_files import BLOCK_SIZE, LAYERS, MASK_ID, DFlashFile, write_dflash
from models.drafting.opened_files import opened_beside
from models.drafting.test_next_token_files import OPTIONS, answers
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.loading import load_core
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.drafters.dflash import build_dflash
from realizar.models.parts import BlockInputs
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec
from reference_model import ReferenceModel
from reference_tensors import load_tensors

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")


def opened(file: DFlashFile, **changed: Any) -> tuple[ModelSpec, ModelSpec, Checkpoint]:
    return opened_beside(build_dflash, file, changed)


@pytest.mark.parametrize("form", FORMS)
def test_a_block_is_what_torch_computes(form: Form, tmp_path: Path) -> None:
    file = write_dflash(tmp_path, form)
    model, spec, checkpoint = opened(file)
    inputs, of_model = spec.next_token, open_checkpoint(file.model_path)
    assert isinstance(inputs, BlockInputs)
    assert (inputs.fusion.layers, inputs.mask_id, inputs.size) == (LAYERS, MASK_ID, BLOCK_SIZE)
    twin = ReferenceModel(spec, load_tensors(spec, checkpoint))
    states = twin.fused(ReferenceModel(model, load_tensors(model, of_model)).streams(file.token_ids))
    found = twin.block(file.block, states)
    errors = np.linalg.norm(found - file.logits, axis=1) / np.linalg.norm(file.logits, axis=1)
    assert errors.max() <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_beside_its_model_changes_no_token(form: Form, tmp_path: Path) -> None:
    file = write_dflash(tmp_path, form)
    checkpoint = open_checkpoint(file.model_path)
    plain = load_core(checkpoint, EngineConfig(**OPTIONS))
    drafted = load_core(checkpoint, EngineConfig(**OPTIONS, drafter=str(file.path), speculative_tokens=5))
    assert drafted.capacity.num_drafts == 5
    assert answers(drafted) == answers(plain)
    assert drafted.scheduler.counts.draft_tokens > 30


@pytest.mark.parametrize("form", FORMS)
def test_loading_is_strict_both_ways(form: Form, tmp_path: Path) -> None:
    file = write_dflash(tmp_path, form)
    tensors = open_checkpoint(file.path).tensors
    name = next(each for each in tensors if "attn_q." in each or "q_proj" in each)
    selector = "selector_hidden.weight" if form == "gguf" else "candidate_selector.hidden.weight"
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, f"missing {name}"),
        ({**tensors, selector: stored(selector, (4, 4))}, f"unexpected {selector}"),
        ({**tensors, name: stored(name, (4, 4))}, f"misshaped {name}"),
    ):
        with pytest.raises(CheckpointError, match=message):
            opened(file, tensors=changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_causal": True}, "'is_causal': unsupported value True"),
        ({"dflash_config": None}, "'target_layer_ids': expected a list of layers"),
        ({"dflash_config": {"mask_token_id": 131, "target_layer_ids": [1]}}, "131 is not within 0 to 130"),
        ({"dflash_config": {"mask_token_id": 1}}, "expected a list of layers"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1], "selector_rank": 4}}, "selector_rank"),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_dflash(tmp_path, "safetensors")
    config = json.loads((file.path / "config.json").read_text())
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        opened(file, metadata={"config": {**config, **changed}})


@pytest.mark.parametrize("form", FORMS)
def test_it_is_no_model_by_itself(form: Form, tmp_path: Path) -> None:
    file = write_dflash(tmp_path, form)
    with pytest.raises(UnsupportedModelError, match="it drafts for another model, as --drafter, and runs beside it"):
        build_spec(open_checkpoint(file.path))
