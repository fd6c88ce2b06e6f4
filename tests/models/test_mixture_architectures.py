"""Mixtures beside qwen3moe, olmoe and gpt-oss: where their tensors lie, and what their keys say or are refused for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import HIDDEN, LAYERS, WIDTH, config_checkpoint, gguf_checkpoint, stored
from models.mxfp4_checkpoints import byte_tensor
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from realizar.models.spec import Experts, FeedForward, ModelSpec
from reference_tensors import load_tensor

EXPERTS, EXPERT_WIDTH = 4, 8
SIZES = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EXPERT_WIDTH}
GGUF: dict[str, dict[str, Any]] = {
    "llama": {"expert_count": EXPERTS, "expert_used_count": 2},
    "qwen2moe": {**SIZES, "expert_shared_feed_forward_length": 24},
    "qwen3moe": SIZES,
    "granitemoe": {"expert_count": EXPERTS, "expert_used_count": 2},
    "qwen3vlmoe": SIZES,
    "ernie4_5-moe": {
        **SIZES, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1, "expert_shared_count": 2,
        "expert_shared_feed_forward_length": 16,
    },
    "glm4moe": {
        **SIZES, "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2,
        "expert_weights_scale": 2.5, "expert_weights_norm": True,
    },
    "minimax-m2": {**SIZES, "expert_gating_func": 2},
    "lfm2moe": {
        **SIZES, "expert_gating_func": 2, "leading_dense_block_count": 1, "shortconv.l_cache": 3,
        "attention.head_count_kv": [0, 2],
    },
}  # fmt: skip
FOLDER: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH,
        "shared_expert_intermediate_size": 24,
    },
    "granitemoe": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "qwen3_vl_moe": {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH},
    "ernie4_5_moe": {
        "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": EXPERT_WIDTH, "moe_num_shared_experts": 2,
    },
    "glm4_moe": {
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    },
    "minimax_m2": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 4, "rotary_dim": 2},
    "lfm2_moe": {
        "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH, "num_dense_layers": 1,
        "conv_L_cache": 3, "layer_types": ["conv", "full_attention"],
    },
}  # fmt: skip
FOLDER["glm4v_moe"] = FOLDER["glm4_moe"]


def gguf(name: str, **keys: Any) -> Checkpoint:
    changes = {f"{name}.{key}": value for key, value in {**GGUF[name], **keys}.items()}
    return gguf_checkpoint(changes, name)


def folder(name: str, **keys: Any) -> Checkpoint:
    return config_checkpoint({"model_type": name, **FOLDER[name], **keys})


def completed(checkpoint: Checkpoint) -> tuple[ModelSpec, Checkpoint]:
    """With the tensors that the spec asks for, of random values."""
    spec, shapes = build_spec(checkpoint), {}
    for source in spec.tensors.values():
        for name in source.names:
            shape = source.stored_shape or (source.shape[1:] if source.stack else source.shape)
            shapes[name] = shape
            if source.fused:
                width = max(s.last_out_feature for s in spec.tensors.values() if name in s.names)
                shapes[name] = (*shape[:-2], width, shape[-1])
    rng = np.random.default_rng(1)
    tensors = {name: stored(name, shape, rng.standard_normal(shape).ravel()) for name, shape in shapes.items()}
    return spec, dataclasses.replace(checkpoint, tensors=tensors)


def experts_of(spec: ModelSpec, layer: int = LAYERS - 1) -> Experts:
    part = spec.layers[layer].feed_forward
    assert isinstance(part, Experts)
    return part


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_in_llama_cpps_names_is_whole(name: str) -> None:
    check_tensors(*completed(gguf(name)))


@pytest.mark.parametrize("name", FOLDER)
def test_a_folder_in_published_names_is_whole(name: str) -> None:
    check_tensors(*completed(folder(name)))


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "glm4moe", "ernie4_5-moe"])
def test_gate_and_up_may_be_one_tensor_in_a_gguf_file(name: str) -> None:
    """`ffn_gate_up_exps`, with the out_features of gate first."""
    spec, apart = completed(gguf(name))
    tensors, whole = dict(apart.tensors), {}
    for index in range(LAYERS):
        gate, up = (tensors.pop(f"blk.{index}.ffn_{part}_exps.weight", None) for part in ("gate", "up"))
        if gate is not None and up is not None:
            values = [load_tensor(spec.tensors[f"model.layers.{index}.mlp.experts.{part}_proj.weight"], apart)
                      for part in ("gate", "up")]  # fmt: skip
            joined = np.concatenate(values, axis=1)
            whole[f"blk.{index}.ffn_gate_up_exps.weight"] = joined
    tensors |= {name: stored(name, values.shape, values.ravel()) for name, values in whole.items()}
    merged = dataclasses.replace(apart, tensors=tensors)
    other = build_spec(merged)
    check_tensors(other, merged)
    assert other.layers == spec.layers
    for part in experts_of(spec).expert_linears():
        for expert in range(EXPERTS):
            found, want = (
                WeightTensors(*pair).expert(part.weight, expert) for pair in ((other, merged), (spec, apart))
            )  # fmt: skip
            np.testing.assert_array_equal(found.dequantize(), want.dequantize())


def test_a_llama_of_a_gguf_file_without_experts_is_dense() -> None:
    for keys in ({}, {"llama.expert_count": 0, "llama.expert_used_count": 0}):
        assert isinstance(build_spec(gguf_checkpoint(keys)).layers[0].feed_forward, FeedForward)
    mixtral = experts_of(build_spec(folder("mixtral")))
    assert experts_of(build_spec(gguf("llama"))) == mixtral
    assert (mixtral.normalized, mixtral.up.out_features) == (True, WIDTH)


def test_shared_experts_and_their_gates() -> None:
    for part in (experts_of(build_spec(gguf("qwen2moe"))), experts_of(build_spec(folder("qwen2_moe")))):
        assert part.shared is not None
        assert part.shared_gate is not None
        assert (part.normalized, part.shared.up.out_features, part.shared_gate.out_features) == (False, 24, 1)
    spec, checkpoint = completed(gguf("qwen2moe"))
    name = "model.layers.1.mlp.shared_expert_gate.weight"
    assert checkpoint.tensors[spec.tensors[name].name].shape == (HIDDEN,)
    assert WeightTensors(spec, checkpoint).matrix(name).dequantize().shape == (1, HIDDEN)
    bare = experts_of(build_spec(gguf("granitemoe")))
    assert bare.shared is None
    assert experts_of(build_spec(gguf("granitemoe", expert_shared_feed_forward_length=16))) == experts_of(
        build_spec(folder("granitemoeshared"))
    )


def test_sigmoids_selection_biases_and_scales() -> None:
    glm, m2 = (experts_of(build_spec(gguf(name))) for name in ("glm4moe", "minimax-m2"))
    assert (glm.scoring, glm.scale, glm.normalized, m2.scoring, m2.scale) == ("sigmoid", 2.5, True, "sigmoid", 1.0)
    assert glm == experts_of(build_spec(folder("glm4_moe")))
    ernie = experts_of(build_spec(gguf("ernie4_5-moe")))
    assert (ernie.scoring, ernie.normalized) == ("softmax", True)
    assert ernie.shared is not None
    assert ernie.shared.up.out_features == 16
    grouped = experts_of(build_spec(folder("glm4_moe", n_group=4, topk_group=2)))
    assert (grouped.num_groups, grouped.groups_per_token) == (4, 2)
    assert experts_of(build_spec(gguf("glm4moe", expert_group_count=4, expert_group_used_count=2))) == grouped


def test_a_file_of_ernie_without_selection_bias_has_none() -> None:
    checkpoint = gguf("ernie4_5-moe")
    assert experts_of(build_spec(checkpoint)).selection_bias is None
    spare = stored("blk.1.exp_probs_b.bias", (EXPERTS,))
    with_bias = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, spare.name: spare})
    assert experts_of(build_spec(with_bias)).selection_bias is not None


def test_leading_layers_are_dense() -> None:
    for checkpoint in (gguf("glm4moe"), folder("glm4_moe"), gguf("ernie4_5-moe"), folder("ernie4_5_moe")):
        kinds = [type(layer.feed_forward) for layer in build_spec(checkpoint).layers]
        assert kinds == [FeedForward, Experts]


def test_layers_that_draft_are_known_and_not_run() -> None:
    """The last layer of a GGUF file counts among its blocks; in a folder it lies behind the others."""
    spec, checkpoint = completed(gguf("glm4moe"))
    extra = {"blk.2.nextn.eh_proj.weight": (HIDDEN, 2 * HIDDEN), "blk.2.attn_norm.weight": (HIDDEN,)}
    longer = {**checkpoint.tensors, **{name: stored(name, shape) for name, shape in extra.items()}}
    metadata = {**checkpoint.metadata, "glm4moe.block_count": LAYERS + 1, "glm4moe.nextn_predict_layers": 1}
    drafting = dataclasses.replace(checkpoint, tensors=longer, metadata=metadata)
    assert build_spec(drafting).layers == spec.layers
    check_tensors(build_spec(drafting), drafting)
    spec, checkpoint = completed(folder("glm4_moe", num_nextn_predict_layers=1))
    for index, error in ((LAYERS, None), (LAYERS + 1, "unexpected")):
        name = f"model.layers.{index}.eh_proj.weight"
        more = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: stored(name, (HIDDEN, HIDDEN))})
        if error is None:
            check_tensors(build_spec(more), more)
        else:
            with pytest.raises(CheckpointError, match=error):
                check_tensors(build_spec(more), more)
    spec, checkpoint = completed(folder("ernie4_5_moe"))
    name = "model.mtp_block.0.mlp.up_proj.weight"
    more = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: stored(name, (WIDTH, HIDDEN))})
    check_tensors(build_spec(more), more)


def test_half_of_each_head_is_rotated() -> None:
    spec = build_spec(folder("glm4_moe"))
    assert spec.layers[0].mixer.rope.size == 2  # of 4
    assert build_spec(folder("minimax_m2")).layers[0].mixer.rope.size == 2
    assert build_spec(folder("minimax_m2", rotary_dim=4)).layers[0].mixer.rope.size == 4


def test_a_key_of_null_leaves_the_count_to_the_other() -> None:
    assert build_spec(folder("qwen2_moe", num_local_experts=None)).layers == build_spec(folder("qwen2_moe")).layers


def test_experts_of_mxfp4_never_lie_transposed() -> None:
    checkpoint = folder("qwen3_vl_moe", moe_intermediate_size=32, quantization_config={"quant_method": "mxfp4"})
    name, codes = "model.layers.0.mlp.experts.gate_up_proj", np.zeros((EXPERTS, 64, 1, 16), np.uint8)
    scales = codes[..., 0]
    like = next(iter(checkpoint.tensors.values()))
    packed = [byte_tensor(like, f"{name}_blocks", codes), byte_tensor(like, f"{name}_scales", scales)]
    tensors = {**checkpoint.tensors, **{each.name: each for each in packed}}
    spec = build_spec(dataclasses.replace(checkpoint, tensors=tensors))
    assert not any(source.transposed for source in spec.tensors.values())


@pytest.mark.parametrize("width", [HIDDEN // 2, 12, HIDDEN])
def test_published_experts_of_qwen3_vl_lie_transposed(width: int) -> None:
    spec, checkpoint = completed(folder("qwen3_vl_moe", moe_intermediate_size=width))
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if ".experts." not in name}
    whole = {name: load_tensor(source, checkpoint) for name, source in spec.tensors.items()}
    for index in range(LAYERS):
        base = f"model.layers.{index}.mlp.experts"
        gate, up, down = (whole[f"{base}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        for name, values in (
            (f"{base}.gate_up_proj", np.concatenate([gate, up], axis=1).swapaxes(1, 2)),
            (f"{base}.down_proj", down.swapaxes(1, 2)),
        ):
            tensors[name] = stored(name, values.shape, values.ravel())
    published = dataclasses.replace(checkpoint, tensors=tensors)
    other = build_spec(published)
    check_tensors(other, published)
    assert other.layers == spec.layers
    for name, values in whole.items():
        np.testing.assert_array_equal(load_tensor(other.tensors[name], published), values)
        if ".experts." in name:
            assert other.tensors[name].transposed
            np.testing.assert_array_equal(WeightTensors(other, published).expert(name, 3).dequantize(), values[3])


BAD_GGUF: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2moe", {"expert_count": 0}, "expert_count.*0 is not within 1 to 1024"),
    ("qwen2moe", {"expert_used_count": 5}, "expert_used_count.*5 is not within 1 to 4"),
    ("qwen2moe", {"expert_used_count": 0}, "expert_used_count.*0 is not within"),
    ("qwen2moe", {"expert_shared_feed_forward_length": 0}, "expert_shared_feed_forward_length.*0 is not within"),
    ("llama", {"expert_used_count": 5}, "expert_used_count.*5 is not within 1 to 4"),
    ("llama", {"expert_used_count": None}, "expert_used_count.*missing"),
    ("granitemoe", {"expert_count": 1025}, "expert_count.*1025 is not within"),
    ("granitemoe", {"expert_shared_feed_forward_length": -1}, "expert_shared_feed_forward_length.*-1 is not within"),
    ("glm4moe", {"expert_group_count": 3}, "expert_group_count.*3 groups do not divide 4 experts"),
    ("glm4moe", {"expert_group_count": 5}, "expert_group_count.*5 is not within 1 to 4"),
    ("glm4moe", {"expert_group_count": 2, "expert_group_used_count": 3}, "group_used_count.*3 is not within 1 to 2"),
    (
        "glm4moe",
        {"expert_group_count": 4, "expert_group_used_count": 1},
        "group_used_count.*1 groups of 1 have fewer than 2 experts",
    ),
    ("glm4moe", {"expert_gating_func": 4}, "expert_gating_func.*unsupported value 4"),
    ("glm4moe", {"nextn_predict_layers": 2}, "nextn_predict_layers.*2 of 2 layers"),
    ("glm4moe", {"expert_weights_scale": float("nan")}, "expert_weights_scale.*nan is not within"),
    ("glm4moe", {"leading_dense_block_count": -1}, "leading_dense_block_count.*-1 is not within"),
    ("ernie4_5-moe", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step.*0 is not within"),
    ("ernie4_5-moe", {"expert_feed_forward_length": None}, "expert_feed_forward_length.*missing"),
    ("minimax-m2", {"expert_gating_func": 3}, "expert_gating_func.*unsupported value 3"),
    ("minimax-m2", {"expert_feed_forward_length": 0}, "expert_feed_forward_length.*0 is not within"),
    ("qwen3vlmoe", {"rope.dimension_sections": "no"}, "dimension_sections.*expected a list"),
    *(
        (name, {"expert_weights_norm": name == "qwen2moe"}, "expert_weights_norm.*unsupported value")
        for name in GGUF
        if name != "glm4moe"
    ),
]


@pytest.mark.parametrize(("name", "keys", "message"), BAD_GGUF)
def test_bad_keys_of_gguf_files_are_refused(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"^tiny\.gguf: key '{name}\..*{message}"):
        build_spec(gguf(name, **keys))


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_may_say_that_weights_are_divided_by_their_sum(name: str) -> None:
    """Where the family does so, or, as of glm4moe, where both ways are known."""
    stated = build_spec(gguf(name, expert_weights_norm=name != "qwen2moe"))
    assert {experts.normalized for _, experts in stated.mixtures()} == {name != "qwen2moe"}


BAD_FOLDERS: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 0}, "num_local_experts.*0 is not within"),
    ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok.*5 is not within 1 to 4"),
    ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size.*missing"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window.*unsupported value True"),
    ("qwen3_vl_moe", {"norm_topk_prob": False}, "norm_topk_prob.*unsupported value False"),
    ("ernie4_5_moe", {"moe_k": 5}, "moe_k.*5 is not within 1 to 4"),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min.*0.5 is not within"),
    ("ernie4_5_moe", {"moe_gate": "hash"}, "moe_gate.*unsupported value 'hash'"),
    ("glm4_moe", {"n_group": 3}, "n_group.*3 groups do not divide 4 experts"),
    ("glm4_moe", {"first_k_dense_replace": "one"}, "first_k_dense_replace.*expected a whole number"),
    ("minimax_m2", {"rotary_dim": 5}, "rotary_dim.*5 is not within 2 to 4"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func.*unsupported value 'softmax'"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list.*unsupported value \[1, 0\]"),
    ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size.*unsupported value 8"),
]


@pytest.mark.parametrize(("name", "keys", "message"), BAD_FOLDERS)
def test_bad_keys_of_folders_are_refused(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=rf"config\.json: key '{message}"):
        build_spec(folder(name, **keys))


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "message"),
    [
        ("qwen2moe", "blk.1.ffn_up_exps.weight", None, "missing blk.1.ffn_up_exps.weight"),
        ("qwen2moe", "blk.1.ffn_gate_inp_shexp.weight", None, "missing blk.1.ffn_gate_inp_shexp.weight"),
        ("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight", (8,), r"\(8,\) in place of \(16,\)"),
        ("qwen2moe", "blk.0.ffn_down_shexp.weight", (16, 8), r"\(16, 8\) in place of \(16, 24\)"),
        ("glm4moe", "blk.1.exp_probs_b.bias", None, "missing blk.1.exp_probs_b.bias"),
        ("glm4moe", "blk.1.exp_probs_b.bias", (5,), r"\(5,\) in place of \(4,\)"),
        ("glm4moe", "blk.0.ffn_gate_exps.weight", (4, 8, 16), "unexpected blk.0.ffn_gate_exps.weight"),
        ("minimax-m2", "blk.1.ffn_down_exps.weight", (4, 8, 16), r"\(4, 8, 16\) in place of \(4, 16, 8\)"),
        ("minimax-m2", "blk.0.ffn_gate_inp.weight", (5, 16), r"\(5, 16\) in place of \(4, 16\)"),
        ("llama", "blk.0.ffn_gate.0.weight", (24, 16), "unexpected blk.0.ffn_gate.0.weight"),
    ],
)
def test_bad_tensors_of_experts_are_refused(name: str, tensor: str, shape: Any, message: str) -> None:
    spec, checkpoint = completed(gguf(name))
    tensors = {key: value for key, value in checkpoint.tensors.items() if key != tensor}
    if shape is not None:
        tensors[tensor] = stored(tensor, shape)
    with pytest.raises(CheckpointError, match=rf"^tiny\.gguf: tensor '{tensor}': .*{message}"):
        check_tensors(spec, dataclasses.replace(checkpoint, tensors=tensors))


def test_a_selection_bias_that_is_nan_is_refused() -> None:
    spec, checkpoint = completed(gguf("glm4moe"))
    checkpoint.tensors["blk.1.exp_probs_b.bias"].data.view(np.float32)[3] = np.nan
    with pytest.raises(CheckpointError, match=r"tensor 'blk.1.exp_probs_b.bias': number 3 is not finite"):
        WeightTensors(spec, checkpoint).check_vectors()


def test_the_experts_of_a_token_may_be_configured() -> None:
    """In every family, over what a file says; the rest stays as it is."""
    for checkpoint in (*map(gguf, GGUF), *map(folder, FOLDER)):
        plain, other = build_spec(checkpoint), build_spec(checkpoint, expert_used_count=3)
        assert (experts_of(plain).experts_per_token, experts_of(other).experts_per_token) == (2, 3)
        again = dataclasses.replace(experts_of(other), experts_per_token=2)
        assert again == experts_of(plain)
        with pytest.raises(InvalidRequestError, match="expert_used_count 5 is not within 1 to the 4 experts"):
            build_spec(checkpoint, expert_used_count=5)
    old = gguf("qwen3moe", expert_feed_forward_length=None)
    assert experts_of(build_spec(old, expert_used_count=1)) == dataclasses.replace(
        experts_of(build_spec(old)), experts_per_token=1
    )
    grouped = folder("glm4_moe", n_group=4, topk_group=2)
    with pytest.raises(InvalidRequestError, match="expert_used_count 3 is not within 1 to the 2 experts"):
        build_spec(grouped, expert_used_count=3)
    with pytest.raises(InvalidRequestError, match=r"expert_used_count: tiny.gguf has no experts"):
        build_spec(gguf_checkpoint(), expert_used_count=1)
