"""Gemma 4's experts beside dense feed-forwards: where their tensors and keys lie, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import HIDDEN, LAYERS, WIDTH, config_checkpoint, gguf_checkpoint, stored
from models.test_mixture_architectures import completed, experts_of
from realizar.backends.program import ExpertsBlock, build_program
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.parameters import count_parameters
from realizar.models.registry import build_spec
from realizar.models.spec import FeedForward

EXPERTS, EXPERT_WIDTH = 4, 8
KEYS: dict[str, Any] = {
    "expert_count": EXPERTS,
    "expert_used_count": 2,
    "expert_feed_forward_length": EXPERT_WIDTH,
    "attention.key_length": 4,
    "attention.value_length": 4,
    "attention.sliding_window_pattern": [True, False],
}
CONFIG: dict[str, Any] = {
    "model_type": "gemma4_text",
    "enable_moe_block": True,
    "num_experts": EXPERTS,
    "top_k_experts": 2,
    "moe_intermediate_size": EXPERT_WIDTH,
    "head_dim": 4,
    "global_head_dim": 4,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}


def _gguf(**keys: Any) -> Checkpoint:
    return gguf_checkpoint({f"gemma4.{key}": value for key, value in {**KEYS, **keys}.items()}, "gemma4")


def _folder(**keys: Any) -> Checkpoint:
    """With the two tensors of a layer's experts, by which a checkpoint is known to hold them so."""
    checkpoint, shapes = config_checkpoint({**CONFIG, **keys}), {}
    for index in range(LAYERS):
        shapes[f"model.layers.{index}.experts.gate_up_proj"] = (EXPERTS, 2 * EXPERT_WIDTH, HIDDEN)
        shapes[f"model.layers.{index}.experts.down_proj"] = (EXPERTS, HIDDEN, EXPERT_WIDTH)
    joined = {name: stored(name, shape) for name, shape in shapes.items()}
    return dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, **joined})


def test_a_mixture_lies_beside_the_dense_feed_forward() -> None:
    spec, checkpoint = completed(_folder())
    check_tensors(spec, checkpoint)
    experts = experts_of(spec)
    assert (experts.num_experts, experts.experts_per_token, experts.normalized) == (EXPERTS, 2, True)
    assert (experts.activation, experts.scoring, experts.up.out_features) == ("gelu_tanh", "softmax", EXPERT_WIDTH)
    assert isinstance(experts.shared, FeedForward)
    assert experts.shared.up.out_features == WIDTH
    assert experts.norms is not None
    assert experts.norms.router.weight_scale == HIDDEN**-0.5
    assert spec.layers[0].pre_feedforward_norm is None
    layer = "model.layers.1"
    names = {source.name for source in spec.tensors.values() if source.name.startswith(f"{layer}.")}
    own = ("router.proj.weight", "router.scale", "router.per_expert_scale", "experts.gate_up_proj", "experts.down_proj",
           "mlp.gate_proj.weight", "pre_feedforward_layernorm_2.weight", "post_feedforward_layernorm_1.weight",
           "post_feedforward_layernorm_2.weight")  # fmt: skip
    assert {f"{layer}.{name}" for name in own} <= names
    blocks = [block for block in build_program(spec).blocks if isinstance(block, ExpertsBlock)]
    assert [block.inputs.norm for block in blocks] == [
        part.norms.router for _, part in spec.mixtures() if part.norms is not None
    ]


def test_a_gguf_file_says_the_same_merged_and_apart() -> None:
    merged = gguf_checkpoint(
        _gguf().metadata, "gemma4", **{f"blk__{index}__ffn_gate_up_exps": (4, 16, 16) for index in range(LAYERS)}
    )
    found = {}
    for checkpoint in (_gguf(), merged):
        spec, whole = completed(checkpoint)
        check_tensors(spec, whole)
        found[len(whole.tensors)] = experts_of(spec)
        assert {"blk.1.ffn_gate_inp.scale", "blk.1.pre_ffw_norm_2.weight", "blk.0.post_ffw_norm_1.weight"} <= set(
            whole.tensors
        )
        assert experts_of(spec).expert_scales is None  # a file may leave them out
    apart, joined = found.values()
    assert apart == joined
    assert len(found) == 2
    scaled = gguf_checkpoint(
        _gguf().metadata, "gemma4", **{f"blk__{index}__ffn_down_exps__scale": (4,) for index in range(LAYERS)}
    )
    renamed = {name.replace(".scale.weight", ".scale"): tensor for name, tensor in scaled.tensors.items()}
    experts = experts_of(build_spec(dataclasses.replace(scaled, tensors=renamed)))
    assert experts.expert_scales is not None
    assert dataclasses.replace(experts, expert_scales=None) == apart
    config = experts_of(build_spec(_folder()))
    assert [each.out_features for each in config.expert_linears()] == [
        each.out_features for each in apart.expert_linears()
    ]


def test_a_token_goes_through_some_of_the_parameters() -> None:
    counts = count_parameters(build_spec(_folder()))
    idle = LAYERS * (EXPERTS - 2) * 3 * HIDDEN * EXPERT_WIDTH
    assert counts.total - counts.active == idle


def test_the_experts_of_a_token_may_be_configured() -> None:
    for checkpoint in (_gguf(), _folder()):
        assert experts_of(build_spec(checkpoint, expert_used_count=3)).experts_per_token == 3
        with pytest.raises(InvalidRequestError, match="expert_used_count 5 is not within 1 to the 4 experts"):
            build_spec(checkpoint, expert_used_count=5)


def test_early_configurations_have_another_key_for_the_width() -> None:
    early = _folder(moe_intermediate_size=None, expert_intermediate_size=EXPERT_WIDTH)
    assert build_spec(early).layers == build_spec(_folder()).layers


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_used_count": None}, "expert_used_count.*missing"),
        ({"expert_used_count": 5}, "expert_used_count.*5 is not within 1 to 4"),
        ({"expert_used_count": 0}, "expert_used_count.*0 is not within 1 to 4"),
        ({"expert_count": 1025}, "expert_count.*1025 is not within"),
        ({"expert_feed_forward_length": 0}, "expert_feed_forward_length.*0 is not within"),
        ({"expert_weights_norm": False}, "expert_weights_norm.*unsupported value False"),
        ({"expert_weights_scale": 2.0}, "expert_weights_scale.*unsupported value 2.0"),
    ],
)
def test_bad_keys_of_a_gguf_file_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"^tiny\.gguf: key 'gemma4\.{message}"):
        build_spec(_gguf(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts": None}, "num_experts.*missing"),
        ({"num_experts": 0}, "num_experts.*0 is not within"),
        ({"top_k_experts": 5}, "top_k_experts.*5 is not within 1 to 4"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size.*missing"),
        ({"enable_moe_block": "yes"}, "enable_moe_block.*expected true or false"),
    ],
)
def test_bad_keys_of_a_folder_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: key '{message}"):
        build_spec(_folder(**keys))


@pytest.mark.parametrize(
    ("tensor", "shape", "message"),
    [
        ("blk.1.ffn_gate_inp.scale", None, "missing blk.1.ffn_gate_inp.scale"),
        ("blk.1.ffn_gate_inp.scale", (EXPERTS,), r"\(4,\) in place of \(16,\)"),
        ("blk.0.ffn_down_exps.scale", (HIDDEN,), "unexpected blk.0.ffn_down_exps.scale"),
        ("blk.0.post_ffw_norm_1.weight", None, "missing blk.0.post_ffw_norm_1.weight"),
        ("blk.0.pre_ffw_norm_2.weight", (EXPERTS,), r"\(4,\) in place of \(16,\)"),
        ("blk.1.ffn_down_exps.weight", (EXPERTS, EXPERT_WIDTH, HIDDEN), r"\(4, 8, 16\) in place of \(4, 16, 8\)"),
        ("blk.1.ffn_up.weight", None, "missing blk.1.ffn_up.weight"),
    ],
)
def test_bad_tensors_are_refused(tensor: str, shape: tuple[int, ...] | None, message: str) -> None:
    spec, checkpoint = completed(_gguf())
    tensors = {key: value for key, value in checkpoint.tensors.items() if key != tensor}
    if shape is not None:
        like = next(iter(checkpoint.tensors.values()))
        tensors[tensor] = dataclasses.replace(like, name=tensor, shape=shape)
    with pytest.raises(CheckpointError, match=rf"^tiny\.gguf: tensor '{tensor}': .*{message}"):
        check_tensors(spec, dataclasses.replace(checkpoint, tensors=tensors))


def test_factors_of_some_layers_alone_are_refused() -> None:
    """A file may leave all of them out, but one that lacks a layer's is damaged."""
    _, checkpoint = completed(_gguf())
    name = "blk.0.ffn_down_exps.scale"
    tensors = {**checkpoint.tensors, name: stored(name, (EXPERTS,))}
    damaged = dataclasses.replace(checkpoint, tensors=tensors)
    missing = "blk.1.ffn_down_exps.scale"
    with pytest.raises(CheckpointError, match=rf"^tiny\.gguf: tensor '{missing}': missing {missing}$"):
        check_tensors(build_spec(damaged), damaged)


@pytest.mark.parametrize(
    "name",
    ["router.scale", "router.per_expert_scale", "pre_feedforward_layernorm_2.weight",
     "post_feedforward_layernorm_1.weight", "post_feedforward_layernorm_2.weight"],
)  # fmt: skip
def test_scales_and_norms_that_are_nan_are_refused(name: str) -> None:
    spec, checkpoint = completed(_folder())
    checkpoint.tensors[f"model.layers.1.{name}"].data.view(np.float32)[2] = np.nan
    with pytest.raises(CheckpointError, match=rf"tensor 'model.layers.1.{name}': number 2 is not finite"):
        WeightTensors(spec, checkpoint).check_vectors()
