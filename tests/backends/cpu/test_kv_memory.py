"""The size of the KV cache, and the element type that `auto` stands for."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest

from cpu_runs import Runner
from random_models import Recipe, random_model
from realizar.backends.cpu.kv import memory as kv_memory
from realizar.backends.cpu.kv.memory import KVMemory, KVSizes, kv_limit_bytes
from realizar.config import EngineConfig
from realizar.errors import CapacityError
from resolving import resolved

SPEC, CHECKPOINT = random_model(Recipe())  # one layer of full attention, one with a window of 40
BLOCK_BYTES = 2 * 2 * 64 * 32 * 2  # keys and values, KV heads, head size, tokens, float16


def memory_of(context_length: int = 1024, **options: Any) -> KVMemory:
    config = resolved(SPEC, CHECKPOINT, EngineConfig(**options))
    return KVMemory(SPEC, replace(config, context_length=context_length))


@pytest.mark.parametrize(("weights", "dtype"), [("F32", "f32"), ("F16", "f16"), ("BF16", "f16"), ("Q8_0", "f16")])
def test_auto_is_float32_for_float32_weights_alone(weights: str, dtype: str) -> None:
    runner = Runner(*random_model(Recipe(weights=weights, windows=(None,))), EngineConfig(kv_cache_bytes=4 << 20))
    assert runner.capacity.kv_cache_dtype == dtype
    runner.close()


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
def test_a_type_asked_for_is_kept(dtype: str) -> None:
    assert memory_of(128, kv_cache_bytes=4 << 20, kv_cache_dtype=dtype).dtype == dtype


def test_a_window_needs_blocks_for_itself_and_one_step() -> None:
    memory = memory_of(max_running=3, max_step_tokens=64, kv_cache_bytes=64 << 20, prefix_cache=False)
    assert memory.num_blocks == (3 * 33, 3 * 6)  # 1024 tokens and one block; 40 + 64 + 32 tokens and one block
    assert memory.size_bytes == (3 * 33 + 3 * 6) * BLOCK_BYTES


def test_a_limit_is_kept_and_one_request_always_fits() -> None:
    request = (33 + 6) * BLOCK_BYTES
    memory = memory_of(max_running=8, max_step_tokens=64, kv_cache_bytes=request * 5 // 2)
    assert memory.size_bytes <= request * 5 // 2
    assert memory.num_blocks[0] >= 2 * 33
    assert memory.num_blocks[1] >= 2 * 6
    with pytest.raises(CapacityError, match="lower the context length"):
        memory_of(max_step_tokens=64, kv_cache_bytes=request - 1)


def test_blocks_are_whole_runs_of_keys() -> None:
    with pytest.raises(CapacityError, match="a multiple of 32 on the CPU, not 48"):
        memory_of(block_size=48, kv_cache_bytes=64 << 20)


def test_a_cache_above_free_memory_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is reserved and taken block by block: without a word it would fail or swap long after loading."""
    request = (33 + 6) * BLOCK_BYTES
    options = {"max_running": 2, "max_step_tokens": 64, "kv_cache_bytes": 2 * request}
    monkeypatch.setattr(kv_memory, "free_memory_bytes", lambda: 2 * request)
    with caplog.at_level(logging.INFO):
        memory_of(**options)
        assert not caplog.records
        monkeypatch.setattr(kv_memory, "free_memory_bytes", lambda: 2 * request - 1)
        memory_of(**options)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(r"the KV cache may grow to [\d.]+ MB, and [\d.]+ MB are free: lower kv_cache_bytes", caplog.text)


def test_a_cache_cut_to_what_requests_can_fill_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        memory = memory_of(max_running=1, max_step_tokens=64, kv_cache_bytes=64 << 20, prefix_cache=False)
    assert memory.size_bytes == (33 + 6) * BLOCK_BYTES
    assert "the KV cache takes 639.0 kB of the 67.1 MB that it may: 1 rows of 1024 tokens fill no more" in caplog.text


@pytest.mark.parametrize(("kv_cache_bytes", "num_requests"), [(64 << 20, 105), (None, 4)])
def test_a_prefix_cache_has_blocks_beside_those_of_requests_that_run(
    kv_cache_bytes: int | None, num_requests: int
) -> None:
    """All that is configured, and by default those of a few requests, though only one may run at once."""
    memory = memory_of(max_running=1, max_step_tokens=64, kv_cache_bytes=kv_cache_bytes)
    assert memory.num_blocks[0] // 33 == num_requests


@pytest.mark.parametrize("free_gib", [8, 512])
@pytest.mark.parametrize(("context_length", "num_tokens"), [(512, 64 * 512), (8192, 64 * 1024), (131_072, 131_072)])
def test_the_default_follows_the_use_and_not_the_machine(
    monkeypatch: pytest.MonkeyPatch, context_length: int, num_tokens: int, free_gib: int
) -> None:
    """64 requests of a usual length, and as many as four of the whole context, but only one of a long one."""
    monkeypatch.setattr(kv_memory, "free_memory_bytes", lambda: free_gib << 30)
    spec = SPEC
    config = replace(resolved(spec, CHECKPOINT, EngineConfig(max_running=64)), context_length=context_length)
    sizes = KVSizes(spec, config)
    limit = kv_limit_bytes(spec, config, sizes, free_gib << 30, None)
    whole = KVSizes(spec, replace(config, context_length=min(context_length, 1024))).request_bytes
    assert limit == max(64 * whole, sizes.request_bytes)
    few = replace(config, max_running=4)
    few_whole = kv_limit_bytes(spec, few, sizes, free_gib << 30, None) // sizes.request_bytes
    assert few_whole == (1 if context_length > 32_768 else 4)
    assert sum(sizes.num_blocks(limit)[:1]) * config.block_size >= num_tokens
