"""Mixtures on the whole GPU backend with packed experts: kernels interpreted, CUDA C++ by its twins in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if torch.cuda.is_available():
    pytest.skip("interpreted only where there is no GPU", allow_module_level=True)

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from backends.cuda.matmul.packed_experts import run_packed_experts  # noqa: E402
from backends.cuda.matmul.packed_matmuls import run_packed  # noqa: E402
from backends.cuda.routed_runs import run_prompts  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.cuda.matmul import grouped, routing  # noqa: E402
from realizar.backends.cuda.matmul.experts import most_pair_tokens  # noqa: E402
from realizar.backends.cuda.plan import plan_memory  # noqa: E402
from realizar.backends.parts import SHARED_PART  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from reference_model import ReferenceModel  # noqa: E402
from reference_tensors import load_tensors  # noqa: E402
from resolving import resolved  # noqa: E402
from wider import wider  # noqa: E402

SMALL = Recipe(32, 2, 1, 64, 128, 48, windows=(None, 8, None), weights="Q8_0", experts=5, per_token=2)
GPT_OSS = replace(SMALL, weights="MXFP4", parts=("biases", "expert_biases", "clamped", "sinks"))
STACKED = {"pairs folded", "sums", "grouped", "fused", "routed"}  # with the shared expert in the stacks
CASES = {  # recipe, batch_invariant, kinds of launches that run
    "gate and up in one": (SMALL, False, {"pairs folded", "sums", "grouped", "fused", "routed"}),
    "a part of a strip": (replace(SMALL, feed_forward_size=96), False, {"pairs whole", "routed"}),
    "norms between": (replace(SMALL, parts=("post_norms",)), False, {"pairs whole", "grouped", "fused", "routed"}),
    "layer norms": (replace(SMALL, parts=("layer_norm",)), False, {"pairs whole", "sums", "grouped", "fused"}),
    "floats": (replace(SMALL, weights="BF16"), False, {"grouped", "fused", "routed"}),
    "down of floats": (replace(SMALL, down_weights="F32"), False, {"pairs whole", "routed"}),
    "batch-invariant": (SMALL, True, {"grouped", "fused"}),
    "gpt-oss": (GPT_OSS, False, {"pairs folded", "sums", "grouped", "fused", "routed"}),
    "gpt-oss, batch-invariant": (GPT_OSS, True, {"grouped", "fused"}),
    "gpt-oss, a part of a strip": (replace(GPT_OSS, feed_forward_size=96), False, {"pairs whole", "routed"}),
    "gpt-oss, down of floats": (replace(GPT_OSS, down_weights="F32"), False, {"pairs whole", "routed"}),
    "shared": (replace(SMALL, parts=("shared",)), False, STACKED | {"shared, whole"}),
    "shared, gate, one stack": (replace(SMALL, parts=("shared", "shared_gate")), False, STACKED | {"shared, gate"}),
    "shared, gate, layer norms": (
        replace(SMALL, parts=("shared", "shared_gate", "layer_norm")),
        False,
        {"pairs whole", "sums", "grouped", "fused"},
    ),
    "shared of another type": (
        replace(SMALL, down_weights="Q4_0", parts=("shared", "shared_gate")),
        False,
        {"pairs folded", "pairs whole", "grouped", "fused", "routed"},
    ),
    "shared, gate": (
        replace(SMALL, parts=("shared", "shared_gate"), feed_forward_size=96, seed=1),
        False,
        {"pairs whole", "routed"},
    ),
    "shared floats": (
        replace(SMALL, weights="BF16", parts=("shared", "shared_gate")),
        False,
        {"grouped", "fused", "routed"},
    ),
    "shared, batch-invariant": (
        replace(SMALL, parts=("shared", "shared_gate", "post_norms")),
        True,
        {"grouped", "fused"},
    ),
    "parallel dense": (
        replace(
            SMALL,
            windows=(8, None, 8),
            full_head_size=64,
            parts=(
                "shared",
                "own_norms",
                "expert_scales",
                "post_norms",
                "output_scale",
                "qk_norm",
                "value_norm",
                "k_is_v",
            ),
            activation="gelu_tanh",
        ),
        False,
        {"pairs whole", "grouped", "fused", "routed"},
    ),
    "groups": (
        replace(SMALL, experts=8, parts=("sigmoid", "selection_bias", "groups", "shared")),
        False,
        STACKED | {"shared, whole"},
    ),
}


@pytest.mark.parametrize(
    ("experts", "per_token", "tokens", "hopper_tokens"),
    [(32, 4, 4, 4), (128, 4, 8, 8), (128, 8, 8, 6), (256, 8, 8, 6), (8, 2, 2, 2), (5, 2, 1, 1), (3, 3, 1, 1)],
)
def test_pairs_are_up_to_half_as_many_as_experts(experts: int, per_token: int, tokens: int, hopper_tokens: int) -> None:
    assert most_pair_tokens(experts, per_token, False) == tokens
    assert most_pair_tokens(experts, per_token, True) == hopper_tokens


@pytest.mark.parametrize("name", wider(CASES, "gpt-oss", "parallel dense"))
def test_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of more than 16 tokens, a token beside a chunk of fewer, a token of each row, and one alone, whose pairs
    are no more than half the experts."""
    recipe, batch_invariant, kinds = CASES[name]
    run_packed(monkeypatch)
    launched = run_packed_experts(monkeypatch)
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16",
        batch_invariant=batch_invariant,
    )  # fmt: skip
    runner = GPURunner(spec, checkpoint, config)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, config, "cuda"), 1 << 40)
    assert plan.weight_bytes == runner.capacity.weight_bytes
    assert plan.token_weight_bytes == runner.capacity.weight_bytes_per_token
    first = runner.request(0, random_tokens(recipe, 20, 1))
    second = runner.request(1, random_tokens(recipe, 7, 2), first=2)
    runner.step([(first, 18)])
    runner.step([(first, 1), (second, 5)])
    runner.step([(first, 1), (second, 1)])
    runner.step([(second, 1)])
    reference = ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64)
    for request in (first, second):
        expected = reference.logits(request.token_ids)
        error = np.linalg.norm(request.values() - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() <= 0.03
    runner.close()
    assert set(+launched) == kinds


@pytest.mark.parametrize(
    "parts",
    [
        ("shared", "shared_gate"),
        pytest.param(("shared",), marks=pytest.mark.full),
        pytest.param(("shared", "shared_gate", "layer_norm"), marks=pytest.mark.full),
    ],
)
def test_a_shared_expert_in_the_stacks(parts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks side by side in steps of 1 to 32 tokens, some padded, and some larger than a router's kernel takes: every
    token is near the twin that goes its way. The shared expert has no launches of its own."""
    recipe = replace(SMALL, experts=16, windows=(None, None), parts=parts)  # pairs of up to four tokens
    run_packed(monkeypatch)
    launched = run_packed_experts(monkeypatch)
    monkeypatch.setattr(routing, "MANY_TOKENS", 16)
    config = EngineConfig(
        threads=1, max_running=8, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16",
        graphs=False,
    )  # fmt: skip
    spec, tensors, runs = run_prompts(recipe, config, (1, 2, 4, 3, 25, 18), (1, 2, 12))
    assert max(run.errors(spec, tensors).max() for run in runs) <= 0.03
    assert launched["pairs whole" if "layer_norm" in parts else "pairs folded"]
    assert launched["grouped"]
    assert launched["sums"]


@pytest.mark.parametrize(
    ("name", "halves"),
    [
        ("gate and up in one", True),
        ("shared, gate, one stack", True),
        ("norms between", True),
        ("parallel dense", True),
        ("shared of another type", False),  # which is added to the outputs
        ("batch-invariant", False),
    ],
)
# Outputs of padding keep what memory had.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning")
def test_steps_of_many_tokens(name: str, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 16: outputs of experts are halves, for all that adds them to the stream, and routers' scores come
    from the stream; other steps have floats."""
    recipe, batch_invariant, _ = CASES[name]
    run_packed(monkeypatch)
    launched = run_packed_experts(monkeypatch)
    for module in (grouped, routing):
        monkeypatch.setattr(module, "MANY_TOKENS", 16)
    config = EngineConfig(
        threads=1, max_running=3, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16",
        batch_invariant=batch_invariant, graphs=False,
    )  # fmt: skip
    spec, tensors, runs = run_prompts(recipe, config, (2, 9, 20), (1, 5, 18))
    assert max(run.errors(spec, tensors).max() for run in runs) <= 0.03
    assert (launched["halves"] > 0) is halves
    assert (launched["scored"] > 0) is not batch_invariant
    assert launched["grouped"] > launched["halves"]


def test_a_shared_expert_in_the_stacks_is_not_counted_as_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    run_packed(monkeypatch)
    run_packed_experts(monkeypatch)
    recipe = replace(SMALL, parts=("shared", "shared_gate"))
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64)
    runner = GPURunner(spec, checkpoint, config)
    first = runner.request(0, random_tokens(recipe, 21, 1))
    runner.backend.forget_experts_read()
    runner.step([(first, 1)])
    assert runner.backend.experts_read() == recipe.per_token
    runner.backend.forget_experts_read()
    runner.step([(first, 20)])
    assert recipe.per_token < (runner.backend.experts_read() or 0) <= recipe.experts
    assert SHARED_PART not in {launch.name for launch in runner.backend.model.graphs._body}
    runner.close()


def test_experts_read_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once in a step of a layer, by pairs and by groups, from the last time on that the count was begun."""
    run_packed(monkeypatch)
    run_packed_experts(monkeypatch)
    spec, checkpoint = random_model(SMALL)
    config = EngineConfig(threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64)
    runner = GPURunner(spec, checkpoint, config)
    runner.backend.forget_experts_read()
    assert runner.backend.experts_read() is None
    first = runner.request(0, random_tokens(SMALL, 22, 1))
    runner.step([(first, 20)])
    assert SMALL.per_token < (runner.backend.experts_read() or 0) <= SMALL.experts
    runner.backend.forget_experts_read()
    runner.step([(first, 1)])
    runner.step([(first, 1)])
    assert runner.backend.experts_read() == SMALL.per_token
    runner.close()


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt-oss, batch-invariant", "parallel dense", "groups", "gate and up in one"])
def test_every_token_is_near_the_twin_that_goes_its_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts side by side in many layers: also where a choice is nearly tied. Other experts are far off."""
    recipe, batch_invariant, _ = CASES[name]
    run_packed(monkeypatch)
    run_packed_experts(monkeypatch)
    config = EngineConfig(
        threads=1, max_running=3, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype="f16",
        batch_invariant=batch_invariant, graphs=False,
    )  # fmt: skip
    spec, tensors, runs = run_prompts(recipe, config, (2, 9, 20), (1, 5, 18))
    assert max(run.errors(spec, tensors).max() for run in runs) <= 0.03
    last = runs[-1]
    given = [each.copy() for each in last.chosen]
    given[1][7] = (given[1][7] + 1) % recipe.experts
    assert replace(last, chosen=given).errors(spec, tensors)[7] > 0.1
