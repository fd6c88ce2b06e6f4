"""A row's logits are the same bits alone, in any batch and chunking, over any blocks, with any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_runs import Runner, skip_unless_supported
from random_models import Recipe, random_model, random_tokens
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from wider import wider

# Lengths on both sides of one segment of 256 keys, and of several.
LENGTHS = (3, 37, 300, 530)
RECIPES = {
    "q4_0-64-gqa2": Recipe(),
    "q4_k-80-gqa4-sinks": Recipe(80, 16, 4, weights="Q4_K", windows=(None, 270), parts=("sinks", "biases")),
    "q6_k-96-gqa1-cap": Recipe(96, 8, 8, weights="Q6_K", parts=("soft_cap", "qk_norm", "post_norms")),
    "q8_0-128-gqa8": Recipe(128, 8, 1, weights="Q8_0", windows=(300, None), parts=("token_norm",)),
    "iq4_nl-256-gqa3": Recipe(256, 3, 1, weights="IQ4_NL", parts=("partial_rope", "interleaved")),
    "experts-q4_k": Recipe(
        weights="Q4_K", experts=6, per_token=2, feed_forward_size=256, windows=(None, 40, None), down_weights="Q6_K"
    ),
    "experts-bf16": Recipe(
        64, 4, 4, weights="BF16", experts=5, per_token=3, feed_forward_size=80, parts=("undivided",)
    ),
    "experts-mxfp4-gpt-oss": Recipe(
        64,
        8,
        1,
        weights="MXFP4",
        experts=5,
        per_token=3,
        feed_forward_size=288,
        windows=(40, None, 40),
        parts=("expert_biases", "clamped", "biases", "sinks"),
    ),
    "experts-ungated": Recipe(
        weights="Q4_K",
        experts=8,
        per_token=3,
        feed_forward_size=256,
        windows=(None, None),
        parts=("ungated_experts", "shared", "ungated", "sigmoid"),
        activation="relu_squared",
    ),
    "experts-groups-shared": Recipe(
        weights="Q8_0",
        experts=8,
        per_token=3,
        feed_forward_size=96,
        windows=(None, None),
        parts=("sigmoid", "selection_bias", "groups", "shared", "shared_gate"),
    ),
    "experts-beside-dense": Recipe(
        weights="Q4_K",
        experts=8,
        per_token=3,
        feed_forward_size=256,
        windows=(None, 40, None),
        parts=("shared", "own_norms", "expert_scales", "post_norms"),
        activation="gelu_tanh",
    ),
    "q8_0-256-output-gate": Recipe(
        256, 4, 2, weights="Q8_0", windows=(None, 40), parts=("output_gate", "qk_norm", "partial_rope")
    ),
    "convolutions-q4_k": Recipe(
        weights="Q4_K",
        windows=(None,) * 3,
        recurrent=("convolution", None, "convolution"),
        length=3,
        parts=("qk_norm",),
    ),
    "delta-nets-q8_0": Recipe(
        256,
        4,
        2,
        weights="Q8_0",
        windows=(None,) * 3,
        recurrent=("delta", None, "delta"),
        key_size=64,
        value_size=64,
        parts=("output_gate", "qk_norm", "partial_rope"),
    ),
    "bf16-64-gqa6": Recipe(64, 6, 1, weights="BF16", parts=("layer_norm", "ungated"), activation="gelu"),
}


def make_runner(recipe: Recipe, threads: int, instruction_set: str | None = None, kv: str = "auto") -> Runner:
    config = EngineConfig(
        threads=threads, kv_cache_dtype=kv, max_running=6, max_step_tokens=640, kv_cache_bytes=64 << 20,  # type: ignore[arg-type]
        instruction_set=instruction_set,
    )  # fmt: skip
    return Runner(*random_model(recipe), config)


def scheduled(runner: Runner, prompts: Sequence[Sequence[int]], rng: np.random.Generator) -> list[NDArray[np.float32]]:
    """Run all prompts in steps drawn from `rng`: their rows, the rows' order, and each row's number of tokens."""
    budget, blocks = runner.config.max_step_tokens, -(-max(map(len, prompts)) // runner.config.block_size)
    requests = [
        runner.request(row, ids, rng, first=place * blocks)
        for row, (place, ids) in enumerate(zip(rng.permutation(len(prompts)), prompts, strict=True))
    ]
    while left := [request for request in requests if request.computed < len(request.token_ids)]:
        chosen = [left[i] for i in rng.permutation(len(left))[: rng.integers(1, len(left) + 1)]]
        parts, used = [], 0
        for request in chosen:
            most = min(len(request.token_ids) - request.computed, budget - used)
            if most:
                count = int(min(most, rng.choice([1, 2, 3, 5, 8, 13, 33, 100, 257, 640])))
                parts.append((request, count))
                used += count
        runner.step(parts)
    return [request.values() for request in requests]


def check_same_bits(make: dict[int, Runner], prompts: Sequence[Sequence[int]], schedules: int) -> None:
    alone = [next(iter(make.values())).logits(ids) for ids in prompts]
    assert all(np.isfinite(values).all() and values.std() > 0 for values in alone)
    for threads, runner in make.items():
        for seed in range(schedules):
            found = scheduled(runner, prompts, np.random.default_rng(100 * threads + seed))
            for expected, values in zip(alone, found, strict=True):
                differ = np.flatnonzero((expected.view(np.uint32) != values.view(np.uint32)).any(axis=-1))
                assert not differ.size, f"{threads} threads, schedule {seed}: tokens {differ[:5]} of {len(expected)}"


EACH_TIME = (
    "q4_k-80-gqa4-sinks", "q6_k-96-gqa1-cap", "experts-mxfp4-gpt-oss", "experts-groups-shared", "convolutions-q4_k",
    "delta-nets-q8_0", "bf16-64-gqa6",
)  # fmt: skip


@pytest.mark.parametrize("name", wider(RECIPES, *EACH_TIME))
def test_random_models(name: str) -> None:
    recipe = RECIPES[name]
    prompts = [random_tokens(recipe, length, seed) for seed, length in enumerate(LENGTHS)]
    runners = {threads: make_runner(recipe, threads) for threads in (1, 2, 3)}
    check_same_bits(runners, prompts, 2)
    for runner in runners.values():
        runner.close()


@pytest.mark.parametrize("kv", ["bf16", "int8", "fp8"])
def test_kv_element_types(kv: str) -> None:
    recipe = RECIPES["q4_k-80-gqa4-sinks"]
    prompts = [random_tokens(recipe, length, seed) for seed, length in enumerate(LENGTHS)]
    runners = {threads: make_runner(recipe, threads, kv=kv) for threads in (1, 2)}
    check_same_bits(runners, prompts, 2)
    for runner in runners.values():
        runner.close()


@pytest.mark.full
@pytest.mark.parametrize("instruction_set", ["avx_vnni", "avx2", "portable"])
@pytest.mark.parametrize("name", RECIPES)
def test_other_instruction_sets(name: str, instruction_set: str) -> None:
    skip_unless_supported(instruction_set)
    recipe = RECIPES[name]
    prompts = [random_tokens(recipe, length, seed) for seed, length in enumerate(LENGTHS)]
    runners = {threads: make_runner(recipe, threads, instruction_set) for threads in (1, 2)}
    check_same_bits(runners, prompts, 1)
    for runner in runners.values():
        runner.close()


def test_smollm2(smollm2_path: Path) -> None:
    checkpoint = open_checkpoint(smollm2_path)
    spec = build_spec(checkpoint, 1024)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, spec.vocab_size, length).tolist() for length in (5, 40, 290)]
    config = EngineConfig(threads=2, max_running=4, max_step_tokens=320, kv_cache_bytes=256 << 20)
    runner = Runner(spec, checkpoint, config)
    check_same_bits({2: runner}, prompts, 2)
    runner.close()
