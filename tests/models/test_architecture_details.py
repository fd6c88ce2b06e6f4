"""Single architectures read their keys, and have defaults for missing keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from gguf_conversion import INTERLEAVED, PERMUTED
from handmade_checkpoint import (
    CONFIG,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCABULARY,
    WIDTH,
    config_checkpoint,
    gguf_checkpoint,
    stored,
)
from models.hybrids.hybrid_keys import CONFIGS as DELTA_CONFIGS
from models.hybrids.hybrid_keys import GGUF as DELTA_GGUF
from models.test_mixture_architectures import FOLDER as MIXTURES_FOLDER
from models.test_mixture_architectures import GGUF as MIXTURES_GGUF
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models import registry
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import Rope
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec


def _windows(spec: ModelSpec) -> list[int | None]:
    return [layer.mixer.window for layer in spec.layers]


def _rope(spec: ModelSpec, layer: int = 0) -> Rope:
    rope = spec.layers[layer].mixer.rope
    assert rope is not None
    return rope


# Keys that only these architectures have and that must be there: of a GGUF file, and of config.json.
_GGUF_KEYS: dict[str, dict[str, Any]] = {
    "starcoder2": {"starcoder2.attention.layer_norm_epsilon": 1e-5},
    "lfm2": {"lfm2.shortconv.l_cache": 3, "lfm2.attention.head_count_kv": [0, KV_HEADS]},
    "qwen3moe": {
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": WIDTH,
    },
    **DELTA_GGUF,
    "olmoe": {"olmoe.expert_count": 4, "olmoe.expert_used_count": 2},
    "gpt-oss": {
        "gpt-oss.expert_count": 4,
        "gpt-oss.expert_used_count": 2,
        "gpt-oss.expert_feed_forward_length": WIDTH,
    },
    **{
        name: {f"{name}.{key}": value for key, value in keys.items()}
        for name, keys in MIXTURES_GGUF.items()
        if name not in ("llama", "qwen3moe")
    },
}
_CONFIG_KEYS: dict[str, dict[str, Any]] = {
    "starcoder2": {"norm_epsilon": 1e-5},
    **{key: {"conv_L_cache": 3, "full_attn_idxs": [1]} for key in ("lfm2", "lfm2_vl", "lfm2-vl")},
    "internvl": {"text_config": {**CONFIG, "model_type": "qwen2"}},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH},
    **DELTA_CONFIGS,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": HIDDEN // HEADS},
    **MIXTURES_FOLDER,
}


def _pairings(spec: ModelSpec) -> set[str]:
    return {layer.mixer.rope.pairing for layer in spec.layers if getattr(layer.mixer, "rope", None) is not None}


@pytest.mark.parametrize("architecture", registry._BY_GGUF_ARCHITECTURE)
def test_pairs_are_neighbours_in_gguf_files_whose_rows_the_converter_reorders(architecture: str) -> None:
    spec = build_spec(gguf_checkpoint(_GGUF_KEYS.get(architecture), architecture))
    assert _pairings(spec) == {"interleaved" if architecture in (*PERMUTED, *INTERLEAVED) else "neox"}


@pytest.mark.parametrize("model_type", registry._BY_MODEL_TYPE)
def test_pairs_are_halves_of_a_head_in_safetensors(model_type: str) -> None:
    spec = build_spec(config_checkpoint({"model_type": model_type, **_CONFIG_KEYS.get(model_type, {})}))
    assert _pairings(spec) == {"interleaved" if model_type in INTERLEAVED else "neox"}


def test_gemma_norm_weights_are_around_zero_only_from_hugging_face() -> None:
    for architecture in ("gemma2", "gemma3"):
        assert build_spec(gguf_checkpoint(architecture=architecture)).final_norm.weight_offset == 0.0
        spec = build_spec(config_checkpoint({"model_type": architecture}))
        assert spec.final_norm.weight_offset == 1.0
        assert spec.embedding_scale == pytest.approx(HIDDEN**0.5)
    third = build_spec(config_checkpoint({"model_type": "gemma3_text"})).layers[0].mixer
    assert third.q_norm is not None
    assert third.q_norm.weight_offset == 1.0


OLD_GEMMA3 = {
    "rope_theta": 2e6,
    "rope_local_base_freq": 5000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window_pattern": 2,
}
NEW_GEMMA3 = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def test_gemma3_configurations_old_and_new_mean_the_same() -> None:
    common: dict[str, Any] = {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 8}
    old = build_spec(config_checkpoint({**common, **OLD_GEMMA3}))
    assert old.layers == build_spec(config_checkpoint({**common, **NEW_GEMMA3})).layers
    assert _windows(old) == [8, None, 8, None]
    assert _rope(old, 0).inverse_frequencies[1] == pytest.approx(5000 ** (-2 / _rope(old).size))
    assert _rope(old, 1).inverse_frequencies[1] == pytest.approx(2e6 ** (-2 / _rope(old).size) / 8)


def test_gemma3_keeps_the_local_rope_where_the_window_is_wider_than_the_context() -> None:
    spec = build_spec(config_checkpoint({"model_type": "gemma3_text", "sliding_window": 512}))
    assert _windows(spec) == [None] * LAYERS
    assert _rope(spec).inverse_frequencies[1] == pytest.approx(10000 ** (-2 / _rope(spec).size))


def test_gemma3_inside_a_multi_modal_checkpoint() -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 2304, "num_hidden_layers": 1}}
    plain = build_spec(
        config_checkpoint(
            {
                **config["text_config"],
                "model_type": "gemma3_text",
                "head_dim": 256,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "intermediate_size": 9216,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": True,
            }
        )
    )
    for before, head in (("language_model.model.", "language_model."), ("model.language_model.", "")):
        names = {source.name.replace("model.", before, 1): source.shape for source in plain.tensors.values()}
        names |= {"vision_tower.post_layernorm.weight": (7,), "multi_modal_projector.norm.weight": (7,)}
        names |= {f"{head}lm_head.weight": (262208, 2304)}
        checkpoint = dataclasses.replace(
            config_checkpoint(),
            metadata={"config": config},
            tensors={name: stored(name, s) for name, s in names.items()},
        )
        spec = build_spec(checkpoint)
        check_tensors(spec, checkpoint)
        assert spec.layers == plain.layers


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_largest_gemmas_scale_by_the_width_of_a_head_in_the_hidden_state(architecture: str, layers: int) -> None:
    keys = {f"{architecture}.attention.key_length": 8, f"{architecture}.attention.value_length": 8}
    small = build_spec(gguf_checkpoint(keys, architecture))
    assert small.layers[0].mixer.scale == pytest.approx(8**-0.5)
    large = build_spec(gguf_checkpoint({**keys, f"{architecture}.block_count": layers}, architecture))
    assert large.layers[0].mixer.scale == pytest.approx((HIDDEN / HEADS) ** -0.5)
    stated = build_spec(gguf_checkpoint({**keys, f"{architecture}.attention.scale": 0.25}, architecture))
    assert stated.layers[0].mixer.scale == 0.25


def test_gemma2_assumes_windows_and_caps() -> None:
    keys = {"gemma2.context_length": 8192}
    for checkpoint in (
        gguf_checkpoint(keys, "gemma2"),
        config_checkpoint({"model_type": "gemma2", "max_position_embeddings": 8192, "tie_word_embeddings": None}),
    ):
        spec = build_spec(checkpoint)
        assert _windows(spec) == [4096, None]
        assert spec.layers[0].mixer.soft_cap == 50.0
        assert spec.logit_soft_cap == 30.0
        assert spec.tied == (checkpoint.format == "safetensors")
    config: dict[str, Any] = config_checkpoint({"model_type": "gemma2"}).metadata["config"]
    uncapped = {**config, "attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = build_spec(dataclasses.replace(config_checkpoint(), metadata={"config": uncapped}))
    assert spec.layers[0].mixer.soft_cap is None
    assert spec.logit_soft_cap is None


def test_gemma3_has_a_cap_on_its_logits_alone() -> None:
    spec = build_spec(config_checkpoint({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}))
    assert spec.logit_soft_cap == 30.0
    assert build_spec(gguf_checkpoint({"gemma3.final_logit_softcapping": 30.0}, "gemma3")).logit_soft_cap == 30.0
    with pytest.raises(UnsupportedModelError, match="attn_logit_softcapping"):
        build_spec(gguf_checkpoint({"gemma3.attn_logit_softcapping": 50.0}, "gemma3"))


def test_mistral_window_is_assumed_only_where_the_key_is_missing() -> None:
    config = config_checkpoint({"model_type": "mistral", "max_position_embeddings": 8192}).metadata["config"]
    for change, window in (({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 12}, 12)):
        checkpoint = dataclasses.replace(config_checkpoint(), metadata={"config": {**config, **change}})
        assert _windows(build_spec(checkpoint)) == [window] * LAYERS
    assert _windows(build_spec(gguf_checkpoint({"llama.attention.sliding_window": 12}))) == [12] * LAYERS
    assert _windows(build_spec(gguf_checkpoint())) == [None] * LAYERS


def test_qwen_window_needs_its_switch() -> None:
    off = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}
    assert _windows(build_spec(config_checkpoint(off))) == [None, None]
    assert _windows(build_spec(config_checkpoint({**off, "use_sliding_window": True}))) == [None, 8]
    with pytest.raises(UnsupportedModelError, match=r"qwen2\.attention\.sliding_window"):
        build_spec(gguf_checkpoint({"qwen2.attention.sliding_window": 8}, "qwen2"))
    pattern = {"qwen2.attention.sliding_window": 8, "qwen2.attention.sliding_window_pattern": [True, False]}
    assert _windows(build_spec(gguf_checkpoint(pattern, "qwen2"))) == [8, None]


@pytest.mark.parametrize(("pattern", "expected"), [(1, [None] * 4), (2, [8, None, 8, None]), (0, [8] * 4)])
def test_gguf_window_pattern_is_a_period(pattern: int, expected: list[int | None]) -> None:
    keys = {"gemma2.attention.sliding_window": 8, "gemma2.block_count": 4}
    spec = build_spec(gguf_checkpoint({**keys, "gemma2.attention.sliding_window_pattern": pattern}, "gemma2"))
    assert _windows(spec) == expected
    flags = np.asarray([window is not None for window in expected])
    assert (
        spec.layers
        == build_spec(gguf_checkpoint({**keys, "gemma2.attention.sliding_window_pattern": flags}, "gemma2")).layers
    )


def test_unknown_layer_type_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        build_spec(config_checkpoint({"model_type": "gemma2", "layer_types": ["full_attention", "chunked_attention"]}))


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_phi3_chooses_factors_by_the_configured_context(kind: str) -> None:
    config = {
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": kind, "short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]},
    }
    short, long = (build_spec(config_checkpoint(config), length) for length in (16, 17))
    assert _rope(short).inverse_frequencies == pytest.approx((1.0, 0.01 / 2))
    assert _rope(long).inverse_frequencies == pytest.approx((1 / 4, 0.01 / 8))
    assert _rope(short).magnitude == _rope(long).magnitude == pytest.approx((1 + np.log(4) / np.log(16)) ** 0.5)


def test_dynamic_scaling_changes_nothing_within_the_models_context() -> None:
    dynamic = config_checkpoint({"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    assert build_spec(dynamic).layers == build_spec(config_checkpoint()).layers


def test_gguf_yarn_and_linear_scaling() -> None:
    linear = build_spec(gguf_checkpoint({"llama.rope.scaling.factor": 4.0}))
    assert _rope(linear).inverse_frequencies == pytest.approx((0.25, 0.0025))
    older = build_spec(gguf_checkpoint({"llama.rope.scale_linear": 4.0}))
    assert linear.layers == older.layers
    keys = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
    }
    assert _rope(build_spec(gguf_checkpoint(keys))).magnitude == pytest.approx(1 + 0.1 * np.log(4))
    stated = {**keys, "llama.rope.scaling.yarn_attn_factor": 1.5, "llama.rope.scaling.attn_factor": 2.0}
    assert _rope(build_spec(gguf_checkpoint(stated))).magnitude == pytest.approx(3.0)
    with pytest.raises(UnsupportedModelError, match="yarn_ext_factor"):
        build_spec(gguf_checkpoint({**keys, "llama.rope.scaling.yarn_ext_factor": 0.5}))


def test_gguf_rope_factors_go_with_linear_scaling_and_no_other() -> None:
    def with_table(name: str, metadata: dict[str, Any]) -> Checkpoint:
        table = stored(name, (2,), [1.0, 2.0])
        checkpoint = gguf_checkpoint(metadata)
        return dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: table})

    both = with_table("rope_freqs.weight", {"llama.rope.scaling.factor": 4.0})
    assert _rope(build_spec(both)).inverse_frequencies == pytest.approx((0.25, 0.01 / 8))
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        build_spec(with_table("rope_freqs.weight", yarn))
    with pytest.raises(UnsupportedModelError, match=r"llama\.rope\.scaling\.factor"):
        build_spec(with_table("rope_factors_long.weight", {"llama.rope.scaling.factor": 4.0}))


def test_granite_without_positions() -> None:
    spec = build_spec(gguf_checkpoint({"granite.rope.scaling.finetuned": False}, "granite"))
    assert spec.layers[0].mixer.rope is None


def test_granite_multipliers() -> None:
    keys = {"attention.scale": 0.3, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0}
    spec = build_spec(gguf_checkpoint({f"granite.{key}": value for key, value in keys.items()}, "granite"))
    assert spec.layers[0].mixer.scale == 0.3
    assert (spec.embedding_scale, spec.layers[0].residual_scale, spec.logit_scale) == (12.0, 0.22, 0.125)


def test_gguf_biases_show_in_the_first_layer() -> None:
    checkpoint = gguf_checkpoint()
    biases = {f"blk.{i}.attn_{part}.bias": (16 if part == "q" else 8,) for i in range(LAYERS) for part in "qkv"}
    tensors = {**checkpoint.tensors, **{name: stored(name, shape) for name, shape in biases.items()}}
    biased = dataclasses.replace(checkpoint, tensors=tensors)
    spec = build_spec(biased)
    check_tensors(spec, biased)
    assert spec.layers[1].mixer.k.bias == "model.layers.1.self_attn.k_proj.bias"
    assert spec.layers[1].mixer.o.bias is None
    assert spec.tensors[spec.embedding].shape == (VOCABULARY, HIDDEN)


@pytest.mark.parametrize("tied", [True, False])
def test_phi_names_the_bias_of_the_head(tied: bool) -> None:
    """`lm_head_bias` of a configuration; a GGUF file shows it by the tensor."""
    config = {"model_type": "phi3", "lm_head_bias": True, "tie_word_embeddings": tied}
    checkpoint = config_checkpoint(config)
    with pytest.raises(CheckpointError, match=r"lm_head\.bias"):
        check_tensors(build_spec(checkpoint), checkpoint)
    tensors = {**checkpoint.tensors, "lm_head.bias": stored("lm_head.bias", (VOCABULARY,))}
    spec = build_spec(dataclasses.replace(checkpoint, tensors=tensors))
    check_tensors(spec, dataclasses.replace(checkpoint, tensors=tensors))
    assert spec.head.bias == "lm_head.bias"
    assert spec.tied is tied
    plain = config_checkpoint({**config, "lm_head_bias": False})
    assert build_spec(plain).head.bias is None
    extra = dataclasses.replace(plain, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"unexpected lm_head\.bias"):
        check_tensors(build_spec(plain), extra)


def test_phis_bias_of_the_head_in_a_gguf_file() -> None:
    checkpoint = gguf_checkpoint(architecture="phi3")
    assert build_spec(checkpoint).head.bias is None
    tensors = {**checkpoint.tensors, "output.bias": stored("output.bias", (VOCABULARY,))}
    spec = build_spec(dataclasses.replace(checkpoint, tensors=tensors))
    assert spec.head.bias == "lm_head.bias"
    assert spec.tensors["lm_head.bias"].name == "output.bias"


def _smollm3(**config: Any) -> ModelSpec:
    return build_spec(config_checkpoint({"model_type": "smollm3", "num_hidden_layers": 5, **config}))


def _rotating(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if layer.mixer.rope is not None]


def test_smollm3_layers_without_rope() -> None:
    """A 1 in `no_rope_layers` stands for a layer that rotates. A GGUF file says nothing."""
    assert _rotating(_smollm3()) == [0, 1, 2, 4]
    assert _rotating(_smollm3(no_rope_layer_interval=2)) == [0, 2, 4]
    assert _rotating(_smollm3(no_rope_layer_interval=2, no_rope_layers=[0, 1, 1, 0, 1, 0])) == [1, 2, 4]
    in_gguf = gguf_checkpoint({"smollm3.block_count": 9, "smollm3.rope.freq_base": None}, "smollm3")
    assert _rotating(build_spec(in_gguf)) == [0, 1, 2, 4, 5, 6, 8]
    assert _rope(build_spec(in_gguf)).inverse_frequencies[1] == pytest.approx(10000.0**-0.5)
    assert _rope(_smollm3()).inverse_frequencies[1] == pytest.approx(2e6**-0.5)


def test_smollm3_windows_are_those_of_layers_without_rope() -> None:
    assert _windows(_smollm3(sliding_window=8)) == [None] * 5
    assert _windows(_smollm3(sliding_window=8, use_sliding_window=True)) == [None, None, None, 8, None]
    kinds = ["sliding_attention", *["full_attention"] * 4]
    listed = _smollm3(sliding_window=8, use_sliding_window=True, layer_types=kinds)
    assert _windows(listed) == [8, None, None, None, None]
    with pytest.raises(UnsupportedModelError, match=r"layer_types.*unsupported value 'sliding_attention'"):
        _smollm3(sliding_window=8, layer_types=kinds)
    with pytest.raises(UnsupportedModelError, match=r"smollm3\.attention\.sliding_window"):
        build_spec(gguf_checkpoint({"smollm3.attention.sliding_window": 8}, "smollm3"))


@pytest.mark.parametrize("stated", [[1, 1, 1, 0], [1, 1, 1, 2, 1], "11101", {"3": 0}])
def test_smollm3_refuses_a_list_that_does_not_fit_the_layers(stated: object) -> None:
    with pytest.raises(CheckpointError, match=r"no_rope_layers.*expected a list of 0 and 1 for 5 layers"):
        _smollm3(no_rope_layers=stated)


def test_smollm3_refuses_partial_rotation_of_reordered_heads() -> None:
    with pytest.raises(UnsupportedModelError, match=r"smollm3\.rope\.dimension_count.*2"):
        build_spec(gguf_checkpoint({"smollm3.rope.dimension_count": 2}, "smollm3"))
