"""qwen3moe, olmoe and lfm2: where their tensors lie in both formats, and what their keys say or are refused for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import HIDDEN, KV_HEADS, LAYERS, WIDTH, config_checkpoint, gguf_checkpoint, stored
from realizar.backends.program import (
    AttentionBlock,
    ExpertsBlock,
    FeedForwardBlock,
    ShortConvolutionBlock,
    build_program,
)
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.mixers import ShortConvolution
from realizar.models.registry import build_spec
from realizar.models.spec import Attention, CacheGroup, Experts, FeedForward, ModelSpec
from reference_tensors import load_tensor

EXPERTS, EXPERT_WIDTH = 3, 8
MOE_KEYS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_WIDTH}
MOE_CONFIG = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH}
LFM2_CONFIG = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}


def _with_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> Checkpoint:
    """The checkpoint with the tensors that its spec asks for, of random values."""
    rng, shapes = np.random.default_rng(1), {}
    for source in spec.tensors.values():
        for name in source.names:
            shapes[name] = source.stored_shape or (source.shape[1:] if source.stack else source.shape)
    tensors = {name: stored(name, shape, rng.standard_normal(shape)) for name, shape in shapes.items()}
    return dataclasses.replace(checkpoint, tensors=tensors)


def _moe_gguf(**keys: Any) -> Checkpoint:
    changes = {f"qwen3moe.{key}": value for key, value in {**MOE_KEYS, **keys}.items()}
    return gguf_checkpoint(changes, "qwen3moe")


def _moe_folder(**keys: Any) -> Checkpoint:
    return config_checkpoint({"model_type": "qwen3_moe", **MOE_CONFIG, **keys})


def _olmoe_gguf(**keys: Any) -> Checkpoint:
    changes = {"expert_count": EXPERTS, "expert_used_count": 2, "feed_forward_length": EXPERT_WIDTH, **keys}
    return gguf_checkpoint({f"olmoe.{key}": value for key, value in changes.items()}, "olmoe")


def _olmoe_folder(**keys: Any) -> Checkpoint:
    config = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": EXPERT_WIDTH}
    return config_checkpoint({"model_type": "olmoe", **config, **keys})


def _experts(spec: ModelSpec, layer: int = 0) -> Experts:
    part = spec.layers[layer].feed_forward
    assert isinstance(part, Experts)
    return part


def _lfm2_gguf(**keys: Any) -> Checkpoint:
    changes = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, KV_HEADS], **keys}
    return gguf_checkpoint({f"lfm2.{key}": value for key, value in changes.items()}, "lfm2")


def _lfm2_folder(**keys: Any) -> Checkpoint:
    return config_checkpoint({"model_type": "lfm2", **LFM2_CONFIG, **keys})


def _kinds(spec: ModelSpec) -> list[type]:
    return [type(layer.mixer) for layer in spec.layers]


def test_experts_are_one_tensor_in_gguf_and_many_in_safetensors() -> None:
    in_gguf, in_folder = build_spec(_moe_gguf()), build_spec(_moe_folder())
    name = _experts(in_gguf).down.weight
    assert name == _experts(in_folder).down.weight == "model.layers.0.mlp.experts.down_proj.weight"
    shape = (EXPERTS, HIDDEN, EXPERT_WIDTH)
    assert in_gguf.tensors[name].shape == in_folder.tensors[name].shape == shape
    assert in_gguf.tensors[name].names == ("blk.0.ffn_down_exps.weight",)
    assert in_folder.tensors[name].names == tuple(
        f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(EXPERTS)
    )
    for spec, bare in ((in_gguf, _moe_gguf()), (in_folder, _moe_folder())):
        checkpoint = _with_tensors(bare, spec)
        check_tensors(spec, checkpoint)
        values = load_tensor(spec.tensors[name], checkpoint)
        for expert in range(EXPERTS):
            source = WeightTensors(spec, checkpoint).expert(name, expert)
            np.testing.assert_array_equal(source.dequantize(), values[expert])
        last = checkpoint.tensors[spec.tensors[name].names[-1]].data.view(np.float32).ravel()
        np.testing.assert_array_equal(values[-1].ravel(), last[-HIDDEN * EXPERT_WIDTH :])


def test_fused_experts_of_safetensors_are_rows_of_each_matrix() -> None:
    plain = build_spec(_moe_folder())
    checkpoint = _with_tensors(_moe_folder(), plain)
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if ".experts." not in name}
    whole = {name: load_tensor(source, checkpoint) for name, source in plain.tensors.items()}
    for index in range(LAYERS):
        base = f"model.layers.{index}.mlp.experts"
        gate, up, down = (whole[f"{base}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        joined = np.concatenate([gate, up], axis=1)
        tensors |= {name: stored(name, values.shape, values) for name, values in
                    ((f"{base}.gate_up_proj", joined), (f"{base}.down_proj", down))}  # fmt: skip
    fused = dataclasses.replace(checkpoint, tensors=tensors)
    spec = build_spec(fused)
    check_tensors(spec, fused)
    assert spec.layers == plain.layers
    for name, values in whole.items():
        np.testing.assert_array_equal(load_tensor(spec.tensors[name], fused), values)
        if values.ndim == 3:
            np.testing.assert_array_equal(WeightTensors(spec, fused).expert(name, 2).dequantize(), values[2])
    name = "model.layers.1.mlp.experts.gate_up_proj"
    short = dataclasses.replace(fused, tensors={**tensors, name: stored(name, (EXPERTS, EXPERT_WIDTH, HIDDEN))})
    with pytest.raises(CheckpointError, match=rf"misshaped {name} .* in place of \(3, 16, 16\)"):
        check_tensors(build_spec(short), short)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.layers.1.mlp.experts.2.up_proj.weight", None, "missing model.layers.1.mlp.experts.2.up_proj.weight"),
        ("model.layers.1.mlp.experts.3.up_proj.weight", (EXPERT_WIDTH, HIDDEN), "unexpected .*experts.3.up_proj"),
        ("model.layers.0.mlp.experts.1.down_proj.weight", (HIDDEN, 4), r"misshaped .* \(16, 4\) in place of \(16, 8\)"),
        ("model.layers.0.mlp.gate.weight", (4, HIDDEN), r"misshaped .*mlp.gate.weight \(4, 16\) in place of \(3, 16\)"),
    ],
)
def test_loading_of_experts_is_strict(name: str, change: tuple[int, ...] | None, message: str) -> None:
    spec = build_spec(_moe_folder())
    checkpoint = _with_tensors(_moe_folder(), spec)
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key != name}
    if change is not None:
        tensors[name] = stored(name, change)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(spec, dataclasses.replace(checkpoint, tensors=tensors))


def test_experts_of_several_types_are_refused_before_a_weight_is_read() -> None:
    """The second layer's last expert: everything else could have been packed before."""
    spec = build_spec(_moe_folder())
    checkpoint = _with_tensors(_moe_folder(), spec)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    other = dataclasses.replace(checkpoint.tensors[name], ggml_type=GGMLType.BF16)
    with pytest.raises(UnsupportedModelError, match=r"experts.2.up_proj.weight' is of type BF16, .* of one type$"):
        check_tensors(spec, dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: other}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("blk.1.ffn_down_exps.weight", None, "missing blk.1.ffn_down_exps.weight"),
        ("blk.0.ffn_gate.weight", (WIDTH, HIDDEN), "unexpected blk.0.ffn_gate.weight"),
        ("blk.0.ffn_up_exps.weight", (2, EXPERT_WIDTH, HIDDEN), r"misshaped .* \(2, 8, 16\) in place of \(3, 8, 16\)"),
        ("blk.0.ffn_up_exps.weight", (EXPERTS * EXPERT_WIDTH, HIDDEN), r"misshaped .* \(24, 16\) in place of \(3, 8"),
        (
            "blk.1.ffn_down_exps.weight",
            (EXPERTS, EXPERT_WIDTH, HIDDEN),
            r"misshaped .* \(3, 8, 16\) in place of \(3, 16",
        ),
        (
            "blk.1.ffn_gate_inp.weight",
            (HIDDEN, EXPERTS),
            r"misshaped .*gate_inp.weight \(16, 3\) in place of \(3, 16\)",
        ),
    ],
)
@pytest.mark.parametrize("architecture", ["qwen3moe", "olmoe"])
def test_loading_of_merged_experts_is_strict(
    architecture: str, name: str, change: tuple[int, ...] | None, message: str
) -> None:
    bare = _moe_gguf() if architecture == "qwen3moe" else _olmoe_gguf()
    checkpoint = _with_tensors(bare, build_spec(bare))
    tensors = {key: tensor for key, tensor in checkpoint.tensors.items() if key != name}
    if change is not None:
        tensors[name] = stored(name, change)
    with pytest.raises(CheckpointError, match=message):
        check_tensors(build_spec(bare), dataclasses.replace(checkpoint, tensors=tensors))


def test_olmoe_is_the_same_from_both_formats() -> None:
    """llama.cpp never divides its weights by their sum; a configuration may ask for it."""
    in_gguf, in_folder = build_spec(_olmoe_gguf()), build_spec(_olmoe_folder(num_experts=EXPERTS))
    assert in_gguf.layers == in_folder.layers
    assert (_experts(in_gguf).normalized, _experts(in_gguf).up.out_features) == (False, EXPERT_WIDTH)
    assert _experts(build_spec(_olmoe_folder(norm_topk_prob=True))).normalized
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv.*unsupported value 8"):
        build_spec(_olmoe_folder(clip_qkv=8.0))


def test_which_layers_have_experts() -> None:
    spec = build_spec(_moe_folder(num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]))
    dense, mixed = FeedForward, Experts
    assert [type(layer.feed_forward) for layer in spec.layers] == [dense, mixed, dense, dense, dense]


def test_weights_of_experts_are_divided_by_their_sum_where_the_key_says_so() -> None:
    """transformers does not where the key is missing; a GGUF file has no key, and llama.cpp always does."""
    assert not _experts(build_spec(_moe_folder())).normalized
    assert _experts(build_spec(_moe_folder(norm_topk_prob=True))).normalized
    assert _experts(build_spec(_moe_gguf())).normalized


def test_a_configuration_may_name_the_norms_of_q_and_k() -> None:
    """As Qwen3-Coder-30B-A3B's does; transformers has the norms without asking the key."""
    assert build_spec(_moe_folder(use_qk_norm=True)).layers == build_spec(_moe_folder()).layers


def test_old_gguf_files_share_the_feed_forward_among_the_chosen_experts() -> None:
    assert _experts(build_spec(_moe_gguf(expert_feed_forward_length=None))).gate.out_features == 24 // 2


def test_both_names_of_the_number_of_experts() -> None:
    assert _experts(build_spec(_moe_folder(num_experts=None, num_local_experts=4))).num_experts == 4
    with pytest.raises(CheckpointError, match=r"num_experts.*num_local_experts says 4"):
        build_spec(_moe_folder(num_local_experts=4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window.*unsupported value True"),
        ({"use_qk_norm": False}, "use_qk_norm.*unsupported value False"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok.*4 is not within 1 to 3"),
        ({"mlp_only_layers": "0"}, "mlp_only_layers.*expected a list of layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers.*expected a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step.*0 is not within"),
        ({"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size.*unsupported value 8"),
        ({"n_group": 2}, "n_group.*unsupported value 2"),
    ],
)
def test_keys_of_experts_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_spec(_moe_folder(**keys))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_weights_scale", 2.5),
        ("expert_gating_func", 2),
        ("expert_shared_count", 1),
        ("leading_dense_block_count", 1),
        ("expert_group_count", 2),
    ],
)
def test_gguf_keys_of_experts_that_are_refused(key: str, value: float) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"qwen3moe\.{key}"):
        build_spec(_moe_gguf(**{key: value}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_count": 0}, "expert_count.*0 is not within 1 to 1024"),
        ({"expert_count": 1025}, "expert_count.*1025 is not within 1 to 1024"),
        ({"expert_count": None}, "expert_count.*missing"),
        ({"expert_used_count": 0}, "expert_used_count.*0 is not within 1 to 3"),
        ({"expert_used_count": 4}, "expert_used_count.*4 is not within 1 to 3"),
        ({"expert_used_count": None}, "expert_used_count.*missing"),
    ],
)
@pytest.mark.parametrize("make", [_moe_gguf, _olmoe_gguf])
def test_numbers_of_experts_that_are_refused(make: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_spec(make(**keys))


def test_lfm2_is_the_same_from_both_formats() -> None:
    in_gguf = build_spec(_lfm2_gguf())
    in_folder = build_spec(_lfm2_folder(block_auto_adjust_ff_dim=False, rope_theta=10000.0, tie_word_embeddings=False))
    assert in_gguf.layers == in_folder.layers
    assert in_gguf.final_norm == in_folder.final_norm
    assert _kinds(in_gguf) == [ShortConvolution, Attention]
    assert in_gguf.state_layers() == (0,)
    assert in_gguf.cache_groups() == (CacheGroup(None, (1,)),)
    assert in_gguf.tensors["model.norm.weight"].name == "token_embd_norm.weight"
    assert in_folder.tensors["model.norm.weight"].name == "model.embedding_norm.weight"
    assert in_folder.tensors["model.layers.1.mlp.up_proj.weight"].name == "model.layers.1.feed_forward.w3.weight"
    kernel = "model.layers.0.conv.conv.weight"
    assert in_gguf.tensors[kernel].name == "blk.0.shortconv.conv.weight"
    assert in_folder.tensors[kernel].stored_shape == (HIDDEN, 1, 3)
    for spec, bare in ((in_gguf, _lfm2_gguf()), (in_folder, _lfm2_folder())):
        checkpoint = _with_tensors(bare, spec)
        check_tensors(spec, checkpoint)
        assert load_tensor(spec.tensors[kernel], checkpoint).shape == (HIDDEN, 3)
        WeightTensors(spec, checkpoint).check_vectors()
        values = checkpoint.tensors[spec.tensors[kernel].name].data.view(np.float32)
        values[..., -1] = np.nan
        with pytest.raises(CheckpointError, match=r"conv.* is not finite"):
            WeightTensors(spec, checkpoint).check_vectors()


def test_lfm2_layers_by_index_by_kind_and_neither() -> None:
    mixed = [Attention, ShortConvolution]
    assert _kinds(build_spec(_lfm2_folder(layer_types=None, full_attn_idxs=[0]))) == mixed
    assert _kinds(build_spec(_lfm2_folder(layer_types=["full_attention", "conv"], full_attn_idxs=[0]))) == mixed
    assert _kinds(build_spec(_lfm2_folder(layer_types=None))) == [Attention] * LAYERS
    assert _kinds(build_spec(_lfm2_gguf(**{"attention.head_count_kv": KV_HEADS}))) == [Attention] * LAYERS


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({}, 256),
        ({"block_multiple_of": 10}, 20),
        ({"block_multiple_of": 1, "block_ffn_dim_multiplier": 1.5}, 24),
        ({"block_auto_adjust_ff_dim": False}, 24),
        ({"block_auto_adjust_ff_dim": False, "block_ff_dim": 36}, 36),
        ({"block_ff_dim": 36, "block_multiple_of": 1, "intermediate_size": None}, 24),
    ],
)
def test_lfm2_width_of_the_feed_forward(keys: dict[str, Any], width: int) -> None:
    part = build_spec(_lfm2_folder(**keys)).layers[0].feed_forward
    assert isinstance(part, FeedForward)
    assert part.up.out_features == width


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["conv", "sliding_attention"]}, "layer_types.*unsupported value 'sliding_attention'"),
        ({"layer_types": ["conv"]}, "layer_types.*expected a list of 2"),
        ({"full_attn_idxs": [0]}, "full_attn_idxs.*layer_types says otherwise"),
        ({"full_attn_idxs": "1"}, "full_attn_idxs.*expected a list of layers"),
        ({"conv_dim": 2 * HIDDEN}, "conv_dim.*unsupported value 32"),
        ({"conv_dim_out": 8}, "conv_dim_out.*unsupported value 8"),
        ({"block_use_swiglu": False}, "block_use_swiglu.*unsupported value False"),
        ({"use_pos_enc": False}, "use_pos_enc.*unsupported value False"),
        ({"theta": 5e5}, "theta.*unsupported value 500000.0"),
        ({"tie_embedding": True}, "tie_embedding.*tie_word_embeddings says otherwise"),
        ({"conv_bias": 1}, "conv_bias.*expected true or false"),
        ({"conv_L_cache": 1}, "conv_L_cache.*1 is not within 2"),
    ],
)
def test_lfm2_keys_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_spec(_lfm2_folder(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.head_count_kv": [0, 2, 2]}, "expected a list of 2, one per layer"),
        ({"attention.head_count_kv": [1, 2]}, "head_count_kv"),
        ({"attention.head_count_kv": [0, 0]}, "0 for every layer"),
        ({"attention.sliding_window": 16}, "sliding_window"),
        ({"shortconv.l_cache": None}, "shortconv.l_cache.*missing"),
    ],
)
def test_lfm2_gguf_keys_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        build_spec(_lfm2_gguf(**keys))


def test_a_layer_of_another_architecture_can_not_lack_kv_heads() -> None:
    with pytest.raises(UnsupportedModelError, match="head_count_kv"):
        build_spec(gguf_checkpoint({"llama.attention.head_count_kv": [KV_HEADS, 0]}))


def test_sizes_of_the_parts() -> None:
    part = build_spec(_lfm2_folder(conv_bias=True)).layers[0].mixer
    assert isinstance(part, ShortConvolution)
    assert (part.in_proj.out_features, part.in_proj.in_features) == (3 * HIDDEN, HIDDEN)
    assert part.bias == "model.layers.0.conv.conv.bias"
    assert part.out_proj.bias == "model.layers.0.conv.out_proj.bias"
    experts = _experts(build_spec(_moe_gguf()))
    assert (experts.router.out_features, experts.num_experts, experts.experts_per_token) == (EXPERTS, EXPERTS, 2)


def test_blocks_of_the_program() -> None:
    """Each token goes through the router's matrix; a convolution's block has its two."""
    experts = build_program(build_spec(_moe_gguf()))
    assert [type(block) for block in experts.blocks] == [AttentionBlock, ExpertsBlock] * LAYERS
    names = [linear.weight.removeprefix("model.layers.") for group in experts.block_matmuls() for linear in group]
    assert [name for name in names if ".mlp." in name] == ["0.mlp.gate.weight", "1.mlp.gate.weight"]
    hybrid = build_program(build_spec(_lfm2_gguf()))
    kinds = [ShortConvolutionBlock, FeedForwardBlock, AttentionBlock, FeedForwardBlock]
    assert [type(block) for block in hybrid.blocks] == kinds
    first = hybrid.blocks[0]
    assert first.join.linear is not None
    names = [linear.weight for linear in (*first.inputs.linears, first.join.linear)]
    assert names == ["model.layers.0.conv.in_proj.weight", "model.layers.0.conv.out_proj.weight"]
