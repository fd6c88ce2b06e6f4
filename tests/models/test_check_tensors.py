"""Strict loading both ways: missing, left over and mis-shaped tensors are listed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from handmade_checkpoint import CONFIG, HIDDEN, VOCABULARY, WIDTH, config_checkpoint, gguf_checkpoint, stored
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec


def with_tensor(checkpoint: Checkpoint, tensor: StoredTensor) -> Checkpoint:
    return dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, tensor.name: tensor})


def _problems(checkpoint: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_tensors(build_spec(checkpoint), checkpoint)
    return str(caught.value)


def test_complete_checkpoints_pass() -> None:
    for checkpoint in (gguf_checkpoint(), config_checkpoint()):
        check_tensors(build_spec(checkpoint), checkpoint)


def test_missing_tensors_are_listed() -> None:
    message = _problems(gguf_checkpoint(blk__1__attn_k=None, output_norm=None))
    assert "missing blk.1.attn_k.weight, output_norm.weight" in message


def test_very_many_missing_tensors_are_listed_in_no_more_than_linear_time() -> None:
    """In time that grows with their square the test would not end."""
    keys = {"num_experts": 1024, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_hidden_layers": 64}
    message = _problems(config_checkpoint({"model_type": "qwen3_moe", **keys}))
    assert "missing model.layers.0.self_attn.q_norm.weight" in message
    assert re.search(r"and \d{6} more", message)


def test_left_over_tensors_are_listed() -> None:
    message = _problems(config_checkpoint(score=(2, HIDDEN)))
    assert "unexpected score.weight" in message
    assert message.startswith("tiny: tensor 'score.weight': ")


def test_mis_shaped_tensors_are_listed_with_both_shapes() -> None:
    message = _problems(gguf_checkpoint(blk__0__ffn_up=(WIDTH + 1, HIDDEN), blk__0__ffn_norm=(1, HIDDEN)))
    assert f"blk.0.ffn_norm.weight (1, {HIDDEN}) in place of ({HIDDEN},)" in message
    assert f"misshaped blk.0.ffn_up.weight ({WIDTH + 1}, {HIDDEN}) in place of ({WIDTH}, {HIDDEN})" in message


def test_long_lists_are_cut() -> None:
    message = _problems(gguf_checkpoint(**{f"extra{index}": (1,) for index in range(20)}))
    assert "extra7.weight and 12 more" in message


def test_all_kinds_come_in_one_message() -> None:
    message = _problems(config_checkpoint(extra=(1,), lm_head=(VOCABULARY + 1, HIDDEN), model__norm=None))
    assert all(word in message for word in ("missing model.norm", "unexpected extra", "misshaped lm_head"))


def test_fused_tensor_must_hold_all_rows() -> None:
    fused = {f"blk__{layer}__attn_{part}": None for layer in range(2) for part in "qkv"}
    whole = gguf_checkpoint(**fused, blk__0__attn_qkv=(2 * HIDDEN, HIDDEN), blk__1__attn_qkv=(2 * HIDDEN, HIDDEN))
    spec = build_spec(whole)
    check_tensors(spec, whole)
    source = spec.tensors["model.layers.1.self_attn.v_proj.weight"]
    assert (source.name, source.first_out_feature, source.fused) == (
        "blk.1.attn_qkv.weight",
        HIDDEN + HIDDEN // 2,
        True,
    )
    short = gguf_checkpoint(**fused, blk__0__attn_qkv=(2 * HIDDEN, HIDDEN), blk__1__attn_qkv=(2 * HIDDEN - 1, HIDDEN))
    assert "misshaped blk.1.attn_qkv.weight" in _problems(short)


def test_vocabulary_only_files_have_no_weights() -> None:
    checkpoint = dataclasses.replace(gguf_checkpoint(), tensors={})
    with pytest.raises(UnsupportedModelError, match="no weights"):
        build_spec(checkpoint)
    with pytest.raises(UnsupportedModelError, match="no weights"):
        check_tensors(build_spec(gguf_checkpoint()), checkpoint)


def test_element_type_without_ggml_id_is_named() -> None:
    """It is refused where it is wanted; one that nothing wants may lie there, as masks do."""
    path, checkpoint = Path("shard-2.safetensors"), config_checkpoint()
    checkpoint = with_tensor(checkpoint, StoredTensor("mask", None, (4,), np.zeros(4, np.uint8), path, 0, "BOOL"))
    check_tensors(build_spec(checkpoint), checkpoint)
    norm = StoredTensor("model.norm.weight", None, (HIDDEN,), np.zeros(HIDDEN, np.uint8), path, 0, "F8_E4M3")
    named = r"^shard-2\.safetensors: tensor 'model\.norm\.weight': weights of type F8_E4M3 are not supported$"
    with pytest.raises(UnsupportedModelError, match=named):
        check_tensors(build_spec(checkpoint), with_tensor(checkpoint, norm))


def test_numbers_that_weights_can_not_be_are_refused_by_tensor_and_type() -> None:
    checkpoint = gguf_checkpoint()
    integers = dataclasses.replace(checkpoint.tensors["blk.1.ffn_up.weight"], ggml_type=GGMLType.I32)
    with pytest.raises(
        UnsupportedModelError, match=r"^tiny\.gguf: tensor 'blk\.1\.ffn_up\.weight': .* type I32 are not"
    ):
        check_tensors(build_spec(checkpoint), with_tensor(checkpoint, integers))


def test_tied_and_untied_heads() -> None:
    assert not build_spec(gguf_checkpoint()).tied
    assert build_spec(gguf_checkpoint(output=None)).tied
    assert not build_spec(config_checkpoint()).tied
    tied = config_checkpoint({"tie_word_embeddings": True})
    spec = build_spec(tied)
    assert spec.tied
    check_tensors(spec, tied)  # a copy of the embedding under the head's name is not needed


def test_a_head_of_other_values_is_not_tied_whatever_a_configuration_says() -> None:
    tied = config_checkpoint({"tie_word_embeddings": True})
    names = ("model.embed_tokens.weight", "lm_head.weight")
    shape = tied.tensors[names[0]].shape
    rows = np.arange(shape[0] * shape[1])
    other = rows + (rows == rows[-1])
    for values, is_tied in ((rows, True), (other, False)):
        checkpoint = with_tensor(with_tensor(tied, stored(names[0], shape, rows)), stored(names[1], shape, values))
        spec = build_spec(checkpoint)
        assert spec.tied == is_tied
        assert (names[1] in spec.ignored_tensors) == is_tied


@pytest.mark.parametrize(
    ("top", "text", "tied"),
    [(False, True, True), (True, False, True), (False, False, False), (None, True, True), (True, None, True)],
)
@pytest.mark.parametrize("model_type", ["mistral3", "qwen3_vl"])
def test_either_part_of_a_multi_modal_configuration_ties(
    model_type: str, top: bool | None, text: bool | None, tied: bool
) -> None:
    inner = {key: value for key, value in CONFIG.items() if key not in ("model_type", "architectures")}
    config = {"model_type": model_type, "text_config": {**inner, "tie_word_embeddings": text}}
    config |= {} if top is None else {"tie_word_embeddings": top}
    assert build_spec(dataclasses.replace(config_checkpoint(), metadata={"config": config})).tied == tied


def test_known_tables_are_not_left_over() -> None:
    checkpoint = gguf_checkpoint()
    extra = {name: stored(name, (2,), [1.0, 2.0]) for name in ("rope_freqs.weight", "blk.0.attn_rot_embd")}
    checkpoint = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, **extra})
    check_tensors(build_spec(checkpoint), checkpoint)


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, float("nan")], [1.0]])
def test_bad_rope_factors_are_named(values: list[float]) -> None:
    checkpoint = gguf_checkpoint()
    table = stored("rope_freqs.weight", (len(values),), values)
    checkpoint = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, table.name: table})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        build_spec(checkpoint)


def test_longrope_without_the_chosen_factors_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rope_factors_short\.weight.*missing"):
        build_spec(gguf_checkpoint({"llama.rope.scaling.type": "longrope"}))
