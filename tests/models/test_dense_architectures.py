"""Dense architectures with windows or scaled ropes read their keys, and have defaults for missing ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import config_checkpoint, gguf_checkpoint
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.registry import build_spec
from realizar.models.spec import ModelSpec, Rope

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


def test_seed_oss_has_biases_of_q_k_and_v_unless_told_otherwise() -> None:
    assert _config("seed_oss").layers[0].mixer.q.bias is not None
    assert _config("seed_oss").layers[0].mixer.o.bias is None
    assert _config("seed_oss").layers[0].mixer.head_size == 128
    assert _config("seed_oss", attention_bias=False).layers[0].mixer.q.bias is None
    stored = _gguf("seed_oss").tensors["model.layers.0.post_attention_layernorm.weight"]
    assert stored.name == "blk.0.post_attention_norm.weight"


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


def test_ernie_refuses_scaled_positions_and_partial_rotation() -> None:
    with pytest.raises(UnsupportedModelError, match="compression_ratio"):
        _config("ernie4_5", compression_ratio=2.0)
    with pytest.raises(UnsupportedModelError, match=r"ernie4_5\.rope\.dimension_count.*2"):
        _gguf("ernie4_5", rope__dimension_count=2)
    assert _config("ernie4_5").layers[0].mixer.head_size == 128
    biased = _config("ernie4_5", use_bias=True).layers[0]
    assert biased.mixer.o.bias is not None
    assert biased.feed_forward.down.bias is not None
