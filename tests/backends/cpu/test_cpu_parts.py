"""Random models of unusual parts through the CPU backend, against the reference model in float64."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_runs import Runner, skip_unless_supported
from random_models import Recipe, random_model, random_tokens
from realizar.config import EngineConfig
from reference_model import FP8CacheModel, ReferenceModel
from reference_tensors import load_tensors
from wider import wider

TOKENS = 300  # past one segment of 256 keys
FLOAT_TOLERANCE = 2e-5
RECIPES = {
    "sinks-window": Recipe(parts=("sinks", "biases"), weights="F32"),
    "cap-post-norms": Recipe(
        96, 2, 1, parts=("soft_cap", "post_norms", "qk_norm"), weights="F32", activation="gelu_tanh"
    ),
    "layer-norm-ungated": Recipe(80, 4, 4, parts=("layer_norm", "ungated", "biases"), weights="F32", activation="gelu"),
    "relu-squared": Recipe(
        feed_forward_size=100, parts=("ungated", "biases"), weights="F32", activation="relu_squared"
    ),
    "relu-squared-gated": Recipe(24, 6, 2, hidden_size=72, weights="F32", activation="relu_squared"),
    "partial-interleaved": Recipe(64, 8, 1, parts=("partial_rope", "interleaved", "token_norm"), weights="F32"),
    "no-rope-24": Recipe(24, 6, 2, hidden_size=72, feed_forward_size=100, parts=("no_rope", "qk_norm"), weights="F32"),
    "lacking": Recipe(
        windows=(None, None, 40), lacking=("feed_forward", "mixer"), parts=("post_norms", "biases"), weights="F32"
    ),
    "experts": Recipe(experts=8, per_token=3, feed_forward_size=96, weights="F32"),
    "experts-one": Recipe(experts=1, per_token=1, feed_forward_size=40, weights="F32", parts=("undivided",)),
    "experts-all-72": Recipe(
        24,
        6,
        2,
        hidden_size=72,
        feed_forward_size=50,
        experts=5,
        per_token=5,
        parts=("post_norms",),
        weights="F32",
        activation="gelu_tanh",
    ),
    "experts-gpt-oss": Recipe(
        64,
        4,
        2,
        experts=5,
        per_token=3,
        feed_forward_size=80,
        parts=("expert_biases", "clamped", "biases", "sinks"),
        weights="F32",
    ),
    "experts-groups-shared": Recipe(
        experts=8,
        per_token=3,
        feed_forward_size=80,
        parts=("sigmoid", "selection_bias", "groups", "shared", "undivided"),
        weights="F32",
    ),
    "experts-ungated": Recipe(
        24,
        6,
        2,
        hidden_size=72,
        feed_forward_size=50,
        experts=5,
        per_token=2,
        parts=("ungated_experts", "expert_biases", "sigmoid", "selection_bias", "shared", "ungated"),
        weights="F32",
        activation="relu_squared",
    ),
    "experts-shared-gate": Recipe(
        experts=6,
        feed_forward_size=96,
        parts=("shared", "shared_gate", "post_norms"),
        weights="F32",
    ),
    "experts-beside-dense": Recipe(
        experts=6,
        per_token=3,
        feed_forward_size=80,
        parts=("shared", "own_norms", "expert_scales", "post_norms"),
        activation="gelu_tanh",
        weights="F32",
    ),
    "experts-beside-dense-biases": Recipe(
        experts=5,
        parts=("shared", "own_norms", "layer_norm"),
        weights="F32",
    ),
    "delta-nets": Recipe(
        windows=(None,) * 4,
        recurrent=("delta", "delta", "convolution"),
        parts=("output_gate", "qk_norm"),
        weights="F32",
    ),
    "delta-nets-tiled": Recipe(
        windows=(None,) * 3,
        recurrent=("delta", None, "delta"),
        key_heads=3,
        value_heads=6,
        key_size=16,
        value_size=48,
        parts=("tiled", "biases"),
        weights="F32",
    ),
    "output-gate-256": Recipe(
        256, 4, 2, windows=(None, None), parts=("output_gate", "qk_norm", "partial_rope", "biases"), weights="F32"
    ),
    "output-gate-24": Recipe(24, 6, 2, hidden_size=72, feed_forward_size=100, parts=("output_gate",), weights="F32"),
    "convolutions": Recipe(
        windows=(None,) * 5,
        recurrent=("convolution", None, "convolution", "convolution"),
        length=3,
        parts=("biases", "qk_norm"),
        weights="F32",
    ),
    "convolutions-72": Recipe(
        24, 6, 2, hidden_size=72, feed_forward_size=100, windows=(None, 40), recurrent=("convolution",), weights="F32"
    ),
    "head-256": Recipe(256, 3, 1, windows=(None, 257), parts=("sinks", "soft_cap"), weights="F32"),
}


def relative_errors(found: NDArray[np.float32], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Norm of the error over norm, of each token."""
    errors: NDArray[np.float64] = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return errors


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float64]) -> float:
    """The largest of `relative_errors`."""
    return float(relative_errors(found, expected).max())


def run_both(
    recipe: Recipe, instruction_set: str | None = None, kv: str = "auto", tokens: int = TOKENS
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """[tokens, vocab_size] by the backend, in chunks and then token by token, and by the reference in float64."""
    spec, checkpoint = random_model(recipe)
    ids = random_tokens(recipe, tokens)
    config = EngineConfig(
        threads=2, max_running=1, instruction_set=instruction_set, kv_cache_dtype=kv, context_length=512  # type: ignore[arg-type]
    )  # fmt: skip
    runner = Runner(spec, checkpoint, config)
    found = runner.logits(ids, (33, 1, 200, 30) if tokens == TOKENS else (tokens // 2, 1))
    runner.close()
    return found, ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).logits(ids)


@pytest.mark.parametrize("name", RECIPES)
def test_parts_in_float32(name: str) -> None:
    assert relative_error(*run_both(RECIPES[name])) <= FLOAT_TOLERANCE


def test_a_quantised_router_reads_floats() -> None:
    """Its activations are not rounded, which would change choices: the half-float KV cache's rounding alone remains."""
    recipe = Recipe(experts=7, per_token=2, router_weights="Q8_0", weights="F32", windows=(None,))
    assert relative_error(*run_both(recipe)) <= 2e-3


def test_biases_are_the_heads_too() -> None:
    """The recipes above compare it; without the head's bias the logits would be far off."""
    spec, checkpoint = random_model(RECIPES["sinks-window"])
    tensors = load_tensors(spec, checkpoint)
    assert spec.head.bias is not None
    ids = random_tokens(RECIPES["sinks-window"], 8)
    with_bias = ReferenceModel(spec, tensors, np.float64).logits(ids)
    without = ReferenceModel(spec, {**tensors, spec.head.bias: 0 * tensors[spec.head.bias]}, np.float64).logits(ids)
    assert relative_error(without, with_bias) > 100 * FLOAT_TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("instruction_set", ["avx_vnni", "avx2", "portable"])
@pytest.mark.parametrize("name", RECIPES)
def test_parts_on_other_instruction_sets(name: str, instruction_set: str) -> None:
    skip_unless_supported(instruction_set)
    assert relative_error(*run_both(RECIPES[name], instruction_set)) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("instruction_set", wider(["avx2", "portable"], "avx2"))
def test_a_model_of_parts_on_other_instruction_sets(instruction_set: str) -> None:
    skip_unless_supported(instruction_set)
    assert relative_error(*run_both(RECIPES["head-256"], instruction_set)) <= FLOAT_TOLERANCE


@pytest.mark.parametrize(("kv", "tolerance"), [("f16", 2e-3), ("bf16", 1.5e-2), ("int8", 2e-2), ("fp8", 1e-1)])
def test_kv_element_types_lose_little(kv: str, tolerance: float) -> None:
    error = relative_error(*run_both(RECIPES["sinks-window"], kv=kv))
    assert tolerance / 20 < error <= tolerance


@pytest.mark.parametrize("name", ["sinks-window", "head-256", "lacking"])
def test_a_cache_in_fp8_is_that_of_the_twin(name: str) -> None:
    """But for a number here and there that is as near to another one."""
    spec, checkpoint = random_model(RECIPES[name])
    found, _ = run_both(RECIPES[name], kv="fp8")
    twin = FP8CacheModel(spec, load_tensors(spec, checkpoint), np.float64)
    assert relative_error(found, twin.logits(random_tokens(RECIPES[name], TOKENS))) <= 5e-3


@pytest.mark.parametrize("weights", ["F16", "BF16"])
def test_half_float_weights_are_not_quantised(weights: str) -> None:
    """The half-float KV cache's rounding alone remains."""
    recipe = Recipe(parts=("sinks", "biases"), weights=weights)
    assert relative_error(*run_both(recipe)) <= 2e-3


@pytest.mark.parametrize(
    ("weights", "down"),
    wider([("Q4_K", "Q6_K"), ("MXFP4", "Q8_0"), ("IQ2_XXS", "IQ4_XS"), ("Q8_0", "BF16")], ("MXFP4", "Q8_0")),
)
def test_quantised_experts_differ_by_activations_alone(weights: str, down: str | None) -> None:
    """One token may choose other experts, whose outputs are unrelated, where two scores lie closer than the error."""
    recipe = Recipe(experts=6, per_token=2, weights=weights, down_weights=down, windows=(None,), seed=5)
    assert np.sort(relative_errors(*run_both(recipe, tokens=24)))[-2] <= 6e-2


@pytest.mark.parametrize("weights", ["Q4_0", "Q4_K", "Q6_K"])
def test_quantised_weights_differ_by_activations_alone(weights: str) -> None:
    """int8 activations cost a few percent on weights without structure."""
    recipe = Recipe(parts=("sinks", "biases"), weights=weights)
    assert relative_error(*run_both(recipe)) <= 6e-2
