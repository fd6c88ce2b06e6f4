"""How the KV cache is sized, and which element type `auto` means."""

from __future__ import annotations

import pytest

from backends.cpu_runs import Runner
from random_models import Recipe, random_model
from realizar.backends.cpu.kv.memory import KVMemory
from realizar.config import EngineConfig
from realizar.errors import CapacityError

SPEC, CHECKPOINT = random_model(Recipe())  # one layer of full attention, one with a window of 40
BLOCK_BYTES = 2 * 2 * 64 * 32 * 2  # keys and values, KV heads, head size, tokens, float16


@pytest.mark.parametrize(("weights", "dtype"), [("F32", "f32"), ("F16", "f16"), ("BF16", "f16"), ("Q8_0", "f16")])
def test_auto_is_float32_for_float32_weights_alone(weights: str, dtype: str) -> None:
    runner = Runner(*random_model(Recipe(weights=weights, windows=(None,))), EngineConfig(kv_cache_bytes=4 << 20))
    assert runner.capacity.kv_cache_dtype == dtype
    runner.close()


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_type_asked_for_is_kept(dtype: str) -> None:
    config = EngineConfig(kv_cache_bytes=4 << 20, kv_cache_dtype=dtype)  # type: ignore[arg-type]
    assert KVMemory(SPEC, config, 128, "f32").dtype == dtype


def test_a_window_needs_blocks_for_itself_and_one_step() -> None:
    config = EngineConfig(max_running=3, max_step_tokens=64, kv_cache_bytes=64 << 20)
    memory = KVMemory(SPEC, config, 1024, "f16")
    assert memory.num_blocks == (3 * 33, 3 * 6)  # 1024 tokens and one block; 40 + 64 + 32 tokens and one block
    assert memory.size_bytes == (3 * 33 + 3 * 6) * BLOCK_BYTES


def test_a_limit_is_kept_and_one_request_always_fits() -> None:
    request = (33 + 6) * BLOCK_BYTES
    config = EngineConfig(max_running=8, max_step_tokens=64, kv_cache_bytes=request * 5 // 2)
    memory = KVMemory(SPEC, config, 1024, "f16")
    assert memory.size_bytes <= request * 5 // 2
    assert memory.num_blocks[0] >= 2 * 33
    assert memory.num_blocks[1] >= 2 * 6
    with pytest.raises(CapacityError, match="lower the context length"):
        KVMemory(SPEC, EngineConfig(max_step_tokens=64, kv_cache_bytes=request - 1), 1024, "f16")


def test_blocks_are_whole_runs_of_keys() -> None:
    with pytest.raises(CapacityError, match="multiples of 32"):
        KVMemory(SPEC, EngineConfig(block_size=48, kv_cache_bytes=64 << 20), 1024, "f16")
