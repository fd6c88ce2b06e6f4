"""The two real GGUF files through the reference model, against log-probabilities computed elsewhere in float32.

`tests/data/exact_logprobs.json` has, per model, tokens, and the 20 most probable next ids with their log-probabilities
after token `first` and those that follow it, from the dequantised weights in exact arithmetic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.models.check_tensors import check_tensors
from realizar.models.registry import build_spec
from realizar.models.spec import CacheGroup
from reference_model import ReferenceModel
from reference_tensors import load_tensors

_DATA = Path(__file__).parents[1] / "data" / "exact_logprobs.json"


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_log_probabilities_are_exact(name: str, request: pytest.FixtureRequest) -> None:
    record: dict[str, Any] = json.loads(_DATA.read_text(encoding="utf-8"))[name]
    checkpoint = open_checkpoint(request.getfixturevalue(f"{name}_path"))
    spec = build_spec(checkpoint)
    check_tensors(spec, checkpoint)
    model = ReferenceModel(spec, load_tensors(spec, checkpoint))
    logits = model.head(model.hidden(record["tokens"])[record["first"] :]).astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for row, top in zip(logprobs, record["top_logprobs"], strict=True):
        ids, expected = zip(*top, strict=True)
        assert np.abs(row[list(ids)] - expected).max() < 1e-3
        assert row.argmax() == ids[0]


def test_gemma3_without_a_pattern_key_has_five_windowed_layers_to_each_full_one(gemma3_path: Path) -> None:
    spec = build_spec(open_checkpoint(gemma3_path))
    full = CacheGroup(None, (5, 11, 17))
    assert spec.cache_groups() == (
        CacheGroup(512, tuple(i for i in range(18) if i not in full.layers)),
        full,
    )
    assert spec.layers[0].mixer.rope is not None
    assert spec.layers[5].mixer.rope is not None
    np.testing.assert_allclose(spec.layers[0].mixer.rope.inverse_frequencies[1], 10000 ** (-2 / 256), rtol=1e-6)
    np.testing.assert_allclose(spec.layers[5].mixer.rope.inverse_frequencies[1], 1e6 ** (-2 / 256), rtol=1e-6)


def test_smollm2_is_a_tied_llama_of_interleaved_pairs(smollm2_path: Path) -> None:
    spec = build_spec(open_checkpoint(smollm2_path))
    assert (spec.vocab_size, spec.hidden_size, len(spec.layers), spec.context_length) == (49152, 576, 30, 8192)
    assert spec.tied
    attention = spec.layers[0].mixer
    assert (attention.num_heads, attention.num_kv_heads, attention.head_size) == (9, 3, 64)
    assert attention.rope is not None
    assert (attention.rope.pairing, attention.rope.size) == ("interleaved", 64)
