"""Dense architectures with windows or scaled ropes read their keys, and have defaults for missing ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import CONFIG, config_checkpoint, gguf_checkpoint, stored
from realizar.backends.cpu.supported import SUPPORTED as CPU
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import QueryGrowth, Rope
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec

YARN: dict[str, Any] = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "rope_type": "yarn",
}
LLAMA3: dict[str, Any] = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
MINISTRAL: dict[str, Any] = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1000000.0,
    "rope_type": "yarn",
    "type": "yarn",
}
SIZES = {key: value for key, value in CONFIG.items() if key not in ("model_type", "architectures")}
# Keys as the published files have them, beside the sizes that every file has.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo 3": (
        "olmo3",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "eos_token_id": 100257,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": 100277,
            "rope_scaling": YARN,
            "rope_theta": 500000,
            "sliding_window": 32,
        },
    ),
    "afm 4.5b": (
        "arcee",
        {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 4,
            "hidden_act": "relu2",
            "mlp_bias": False,
            "rope_scaling": {"factor": 20.0, "original_max_position_embeddings": 16, "rope_type": "yarn"},
            "rope_theta": 10000.0,
        },
    ),
    "seed-oss 36b": (
        "seed_oss",
        {
            "attention_bias": True,
            "attention_dropout": 0.1,
            "attention_out_bias": False,
            "head_dim": 4,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "residual_dropout": 0.1,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
        },
    ),
    "exaone 4 32b": (
        "exaone4",
        {
            "attention_dropout": 0.0,
            "head_dim": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": LLAMA3,
            "rope_theta": 1000000,
            "sliding_window": 32,
            "sliding_window_pattern": "LLLG",
        },
    ),
    "exaone 4 1.2b": (
        "exaone4",
        {
            "layer_types": ["full_attention"] * 2,
            "rope_scaling": LLAMA3,
            "rope_theta": 1000000,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
        },
    ),
    "ernie 4.5 0.3b": (
        "ernie4_5",
        {"compression_ratio": 1.0, "head_dim": 4, "rope_scaling": None, "rope_theta": 500000, "use_bias": False},
    ),
    "mistral small 3.1": (
        "mistral3",
        {
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                **SIZES,
                "attention_dropout": 0.0,
                "head_dim": 4,
                "model_type": "mistral",
                "rope_theta": 1000000000.0,
                "sliding_window": None,
            },
            "vision_config": {"model_type": "pixtral"},
            "vision_feature_layer": -1,
        },
    ),
    "ministral 3": ("mistral3", {"text_config": {**SIZES, "model_type": "ministral3", "rope_parameters": MINISTRAL}}),
    "qwen2-vl": (
        "qwen2_vl",
        {
            "image_token_id": 151655,
            "max_window_layers": 28,
            "rope_scaling": {"type": "mrope", "mrope_section": [0, 1, 1]},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "video_token_id": 151656,
            "vision_config": {"depth": 32},
            "vision_end_token_id": 151653,
            "vision_start_token_id": 151652,
            "vision_token_id": 151654,
        },
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {
            "image_token_id": 151655,
            "max_window_layers": 28,
            "rope_scaling": {"type": "mrope", "mrope_section": [0, 1, 1]},
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vision_config": {"depth": 32},
        },
    ),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "image_token_id": 151655,
            "text_config": {
                **SIZES,
                "attention_bias": False,
                "attention_dropout": 0.0,
                "head_dim": 4,
                "model_type": "qwen3_vl_text",
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "rope_theta": 5000000,
            },
            "vision_config": {"deepstack_visual_indexes": [8, 16, 24]},
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_load(name: str) -> None:
    model_type, keys = PUBLISHED[name]
    build_spec(config_checkpoint({"model_type": model_type, **keys}))


def _windows(spec: ModelSpec) -> list[int | None]:
    return [layer.mixer.window for layer in spec.layers]


def _ropes(spec: ModelSpec) -> list[Rope | None]:
    return [layer.mixer.rope for layer in spec.layers]


def _config(model_type: str, layers: int = 4, **keys: Any) -> ModelSpec:
    return build_spec(config_checkpoint({"model_type": model_type, "num_hidden_layers": layers, **keys}))


def _gguf(architecture: str, layers: int = 4, **keys: Any) -> ModelSpec:
    named = {"block_count": layers, **{key.replace("__", "."): value for key, value in keys.items()}}
    return build_spec(gguf_checkpoint({f"{architecture}.{key}": value for key, value in named.items()}, architecture))


def test_olmo3_scales_rope_in_full_layers_alone() -> None:
    """In both forms of a configuration, and in a GGUF file, which calls it olmo2."""
    older = _config("olmo3", rope_scaling=YARN, rope_theta=10000.0, sliding_window=8)
    newer = _config(
        "olmo3",
        sliding_window=8,
        rope_parameters={
            "full_attention": {**YARN, "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    in_gguf = _gguf(
        "olmo2",
        attention__sliding_window=8,
        rope__scaling__type="yarn",
        rope__scaling__factor=8.0,
        rope__scaling__original_context_length=16,
        rope__scaling__yarn_attn_factor=YARN["attention_factor"],
    )
    assert older.layers == newer.layers
    assert _windows(older) == _windows(in_gguf) == [8, 8, 8, None]
    for spec in (older, in_gguf):
        local, full = _ropes(spec)[0], _ropes(spec)[3]
        assert local is not None
        assert full is not None
        assert local.inverse_frequencies == pytest.approx((1.0, 10000.0**-0.5))
        assert local.magnitude == 1.0
        assert full.magnitude == pytest.approx(1.2079441541679836)
        assert full.inverse_frequencies != local.inverse_frequencies
    assert _ropes(older)[3] == _ropes(in_gguf)[3]


def test_olmo3_defaults() -> None:
    spec = _config("olmo3", max_position_embeddings=8192)
    assert _windows(spec) == [4096, 4096, 4096, None]
    rope = _ropes(spec)[0]
    assert rope is not None
    assert rope.inverse_frequencies[1] == pytest.approx(500000.0**-0.5)
    assert len({*_ropes(spec)}) == 1


def test_olmo2_in_a_gguf_file_without_a_window_has_one_rope() -> None:
    spec = _gguf("olmo2", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert _windows(spec) == [None] * 4
    assert len({*_ropes(spec)}) == 1
    pattern = np.asarray([False, True, True, False])
    listed = _gguf("olmo2", attention__sliding_window=8, attention__sliding_window_pattern=pattern)
    assert _windows(listed) == [None, 8, 8, None]


def test_seed_oss_has_biases_of_q_k_and_v_unless_a_key_says_otherwise() -> None:
    assert _config("seed_oss").layers[0].mixer.q.bias is not None
    assert _config("seed_oss").layers[0].mixer.o.bias is None
    assert _config("seed_oss").layers[0].mixer.head_size == 128
    assert _config("seed_oss", attention_bias=False).layers[0].mixer.q.bias is None
    stored = _gguf("seed_oss").tensors["model.layers.0.post_attention_layernorm.weight"]
    assert stored.name == "blk.0.post_attention_norm.weight"


def test_arcee_has_no_gate_and_squares_its_relu() -> None:
    for spec in (_config("arcee", hidden_act="relu2"), _gguf("arcee")):
        assert {(layer.feed_forward.activation, layer.feed_forward.gate) for layer in spec.layers} == {
            ("relu_squared", None)
        }
    biased = _config("arcee", attention_bias=True, mlp_bias=True).layers[0]
    assert biased.mixer.o.bias is not None
    assert biased.feed_forward.up.bias is not None
    assert _gguf("arcee", attention__scale=0.5).layers[0].mixer.scale == 0.5
    with pytest.raises(UnsupportedModelError, match=r"arcee\.rope\.dimension_count.*2"):
        _gguf("arcee", rope__dimension_count=2)


def _rotating(spec: ModelSpec) -> list[bool]:
    return [rope is not None for rope in _ropes(spec)]


def test_exaone4_rotates_only_where_it_has_windows() -> None:
    for pattern in ("LLG", 3):
        spec = _config("exaone4", 6, sliding_window=8, sliding_window_pattern=pattern)
        assert _windows(spec) == [8, 8, None] * 2
        assert _rotating(spec) == [True, True, False] * 2
    wide = _config("exaone4", sliding_window=512)  # as long as the context
    assert _windows(wide) == [None] * 4
    assert _rotating(wide) == [True, True, True, False]
    config = {**config_checkpoint({"model_type": "exaone4"}).metadata["config"], "sliding_window": None}
    without = dataclasses.replace(config_checkpoint(), metadata={"config": config})
    assert _rotating(build_spec(without)) == [True] * 2
    assert _rotating(_gguf("exaone4")) == [True] * 4
    assert _rotating(_gguf("exaone4", attention__sliding_window=8)) == [True, True, True, False]


def test_exaone4_of_64_layers_has_windows_in_a_gguf_file_that_says_nothing() -> None:
    spec = _gguf("exaone4", 64, context_length=8192)
    assert _windows(spec) == [4096, 4096, 4096, None] * 16
    assert _rotating(spec) == [True, True, True, False] * 16


@pytest.mark.parametrize("pattern", ["LLX", "", "llg"])
def test_exaone4_refuses_a_pattern_of_other_letters(pattern: str) -> None:
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern.*expected a text of L and G"):
        _config("exaone4", sliding_window=8, sliding_window_pattern=pattern)


def test_ernie_refuses_scaled_positions() -> None:
    with pytest.raises(UnsupportedModelError, match="compression_ratio"):
        _config("ernie4_5", compression_ratio=2.0)
    assert _config("ernie4_5").layers[0].mixer.head_size == 128
    biased = _config("ernie4_5", use_bias=True).layers[0]
    assert biased.mixer.o.bias is not None
    assert biased.feed_forward.down.bias is not None


def test_glm_rotates_neighbours_in_a_part_of_each_head() -> None:
    """But in GGUF files of models that see, whose rows the converter reorders."""
    seeing = _gguf("glm4", rope__dimension_count=2, rope__dimension_sections=[0, 1, 0, 0])
    for spec, expected in (
        (_config("glm4"), ("interleaved", 64, ())),
        (_config("glm4", head_dim=4, partial_rotary_factor=1.0), ("interleaved", 4, ())),
        (_gguf("glm4", rope__dimension_count=2), ("interleaved", 2, ())),
        (seeing, ("neox", 2, (1,))),
    ):
        assert {(rope.pairing, rope.size, rope.axes) for rope in _ropes(spec) if rope is not None} == {expected}


def _growths(spec: ModelSpec) -> set[QueryGrowth | None]:
    return {layer.mixer.query_growth for layer in spec.layers}


def test_ministral_grows_queries_past_the_original_context_alone() -> None:
    config = config_checkpoint({"model_type": "ministral3", "rope_parameters": MINISTRAL})
    file = gguf_checkpoint(
        {
            "mistral3.attention.temperature_scale": 0.1,
            "mistral3.rope.scaling.type": "yarn",
            "mistral3.rope.scaling.factor": 16.0,
            "mistral3.rope.scaling.original_context_length": 16,
            "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
        },
        "mistral3",
    )
    for checkpoint in (config, file):
        assert _growths(build_spec(checkpoint)) == {QueryGrowth(0.1, 16)}
        assert _growths(build_spec(checkpoint, 17)) == {QueryGrowth(0.1, 16)}
        assert _growths(build_spec(checkpoint, 16)) == {None}
        rope = _ropes(build_spec(checkpoint))[0]
        assert rope is not None
        assert rope.magnitude == 1.0
    assert _growths(_gguf("mistral3")) == {None}
    with pytest.raises(UnsupportedModelError, match="llama_4_scaling_beta"):
        _config("llama", rope_parameters=MINISTRAL)


def test_a_backend_without_growing_queries_refuses_the_long_context_by_name() -> None:
    checkpoint = config_checkpoint({"model_type": "ministral3", "rope_parameters": MINISTRAL})
    supported = dataclasses.replace(CPU, backend="that backend", features=frozenset())
    with pytest.raises(UnsupportedModelError, match="layers 0, 1 have queries that grow with the position, which that"):
        supported.check(build_spec(checkpoint))
    supported.check(build_spec(checkpoint, 16))
    CPU.check(build_spec(checkpoint))


def test_mistral3_with_another_text_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"model_type.*'mistral4'"):
        _config("mistral3", text_config={**SIZES, "model_type": "mistral4"})


@pytest.mark.parametrize(
    ("model_type", "before", "head", "other"),
    [
        ("mistral3", "language_model.model.", "language_model.", "vision_tower.ln_pre.weight"),
        ("mistral3", "model.language_model.", "", "model.multi_modal_projector.norm.weight"),
        ("qwen2_vl", "model.", "", "visual.blocks.0.attn.qkv.weight"),
        ("qwen2_5_vl", "model.language_model.", "", "model.visual.merger.ln_q.weight"),
        ("qwen3_vl", "model.language_model.", "", "model.visual.deepstack_merger_list.0.norm.weight"),
    ],
)
def test_tensors_of_vision_are_known_and_not_needed(model_type: str, before: str, head: str, other: str) -> None:
    config = config_checkpoint({"model_type": model_type})
    names = {source.name: source.shape for source in build_spec(config).tensors.values()}
    names = {name.replace("model.", before, 1): shape for name, shape in names.items() if name != "lm_head.weight"}
    names |= {f"{head}lm_head.weight": (CONFIG["vocab_size"], CONFIG["hidden_size"]), other: (7,)}
    tensors = {name: stored(name, shape) for name, shape in names.items()}
    checkpoint = dataclasses.replace(config, tensors=tensors)
    spec = build_spec(checkpoint)
    check_tensors(spec, checkpoint)
    assert other in spec.ignored_tensors
    assert not spec.tied
    strange = dataclasses.replace(config, tensors={**tensors, "model.sound.weight": stored("model.sound.weight", (7,))})
    with pytest.raises(CheckpointError, match=r"unexpected model\.sound\.weight"):
        check_tensors(build_spec(strange), strange)


def test_the_text_model_of_internvl_is_qwen2_or_qwen3() -> None:
    def seeing(model_type: str) -> ModelSpec:
        return _config("internvl", text_config={**CONFIG, "model_type": model_type, "num_hidden_layers": 4})

    for model_type in ("qwen2", "qwen3"):
        assert seeing(model_type).layers == _config(model_type).layers
    with pytest.raises(UnsupportedModelError, match=r"'model_type': unsupported value 'gpt_oss'"):
        seeing("gpt_oss")


def test_the_rope_of_three_axes_is_plain_for_text() -> None:
    axes = {"mrope_section": [0, 1, 1]}
    deep = _gguf("qwen3vl", rope__dimension_sections=[24, 20, 20, 0], n_deepstack_layers=3)
    for spec, plain, expected in (
        (_config("qwen2_vl", rope_scaling={"type": "mrope", **axes}, rope_theta=10000.0), _config("qwen2"), (1, 2)),
        (_gguf("qwen2vl", rope__dimension_sections=[0, 1, 1, 0]), _gguf("qwen2"), (1, 2)),
        (deep, _gguf("qwen3"), (0, 1)),
    ):
        ropes = [rope for rope in _ropes(spec) if rope is not None]
        assert {rope.axes for rope in ropes} == {expected}
        assert [dataclasses.replace(rope, axes=()) for rope in ropes] == _ropes(plain)
    assert deep.deepstack == 3
    with pytest.raises(UnsupportedModelError, match=r"rope_type.*'mrope'"):
        _config("qwen2", rope_scaling={"type": "mrope"})
    with pytest.raises(UnsupportedModelError, match="mrope_section"):
        _config("qwen2", rope_scaling={"type": "default", **axes})
    with pytest.raises(CheckpointError, match=r"mrope_section.*expected a list"):
        _config("qwen2_vl", rope_scaling={"type": "mrope", "mrope_section": 3})
    with pytest.raises(CheckpointError, match=r"mrope_section.*\[16, 24, 24\] are not sections of 2 frequencies"):
        _config("qwen2_vl", rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})
    with pytest.raises(UnsupportedModelError, match=r"mrope_interleaved.*False"):
        _config("qwen3_vl", rope_scaling={"type": "mrope", "mrope_interleaved": False})
    with pytest.raises(CheckpointError, match=r"dimension_sections.*expected three whole numbers"):
        _gguf("qwen3vl", rope__dimension_sections=[24, 20], n_deepstack_layers=3)
