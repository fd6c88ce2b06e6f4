"""Frequencies of every kind of scaling, against transformers' own functions, nearly all to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from handmade_checkpoint import config_checkpoint
from realizar.models.parts import Rope
from realizar.models.registry import build_spec
from realizar.models.rope import plain_frequencies, proportional_frequencies

torch = pytest.importorskip("torch", reason="frequencies are compared with transformers', which needs torch")
transformers = pytest.importorskip("transformers", reason="frequencies are compared with transformers'")

HEAD_SIZE = 128
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-stated": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.25,
        "truncate": False,
    },
    "yarn-mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    "longrope": {
        "original_max_position_embeddings": 4096,
        "factor": 32.0,
        "short_factor": [1.0 + index / 64 for index in range(HEAD_SIZE // 2)],
        "long_factor": [1.0 + index for index in range(HEAD_SIZE // 2)],
    },
}


def _ours(rope_config: dict[str, Any]) -> Rope:
    sizes = {"hidden_size": 4 * HEAD_SIZE, "max_position_embeddings": 131072}
    rope = build_spec(config_checkpoint({**sizes, **rope_config})).layers[0].mixer.rope
    assert rope is not None
    return rope


def _theirs(kind: str, parameters: dict[str, Any], seq_len: int) -> tuple[Any, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_SIZE, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    if kind == "default":
        embedding = LlamaRotaryEmbedding(config)
        return embedding.inv_freq.numpy(), embedding.attention_scaling
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seq_len)
    return frequencies.numpy(), magnitude


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_transformers(name: str, base: float) -> None:
    kind = name.split("-")[0]
    parameters = {"rope_type": kind, "rope_theta": base, **SCALINGS[name]}
    expected, magnitude = _theirs(kind, dict(parameters), seq_len=131072)
    found = _ours({"rope_parameters": parameters})
    frequencies = np.asarray(found.inverse_frequencies, np.float32)
    # torch's float32 power is at times one bit off, which llama-3's blend can make four.
    assert (frequencies == expected).mean() >= 0.95
    np.testing.assert_array_max_ulp(frequencies, expected, maxulp=4)
    assert found.magnitude == pytest.approx(magnitude, rel=1e-12)
    assert all(float(np.float32(value)) == value for value in found.inverse_frequencies)


@pytest.mark.parametrize("name", SCALINGS)
def test_older_configurations_mean_the_same(name: str) -> None:
    kind = name.split("-")[0]
    new = {"rope_type": kind, "rope_theta": 5e5, **SCALINGS[name]}
    old = {"rope_theta": 5e5, "rope_scaling": None if kind == "default" else {"type": kind, **SCALINGS[name]}}
    assert _ours({"rope_parameters": new}) == _ours(old)


def test_proportional_frequencies_are_plain_ones_and_zeros() -> None:
    """The share counts dimensions of the head, and exponents go by the whole head."""
    found = proportional_frequencies(1e6, 16, 0.25, 2.0)
    np.testing.assert_array_equal(found[:2], plain_frequencies(1e6, 16)[:2] / np.float32(2))
    np.testing.assert_array_equal(found[2:], np.zeros(6, np.float32))
    np.testing.assert_array_equal(proportional_frequencies(1e6, 16, 1.0, 1.0), plain_frequencies(1e6, 16))
