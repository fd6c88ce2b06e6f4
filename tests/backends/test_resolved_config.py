"""A configuration resolved for each kind of device, with values given and left open. No GPU is needed."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any

import pytest

from random_models import Recipe, random_model
from realizar.backends import resolved_config
from realizar.backends.devices import ChosenDevice
from realizar.backends.resolved_config import ResolvedConfig, resolve_config
from realizar.backends.weight_tensors import WeightTensors
from realizar.config import Device, EngineConfig
from realizar.errors import InvalidRequestError
from scripted_backend import make_spec

CPU, CUDA = ChosenDevice("cpu"), ChosenDevice("cuda", 1, "NVIDIA X")
SPEC = make_spec((None,), context_length=4096)
GIVEN = EngineConfig(
    threads=3, context_length=100, max_running=7, max_queued=5, kv_cache_dtype="int8", max_step_tokens=48,
    block_size=64, kv_cache_bytes=1 << 20, speculative_tokens=2, batch_invariant=True, prefix_cache=False,
    prompt_dtype="f16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def five_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_config, "default_threads", lambda: 5)


def derived(config: ResolvedConfig) -> dict[str, Any]:
    """The values that may be left open, as they were decided."""
    return {
        name: getattr(config, name)
        for name in ("threads", "context_length", "max_running", "queue_length", "kv_dtype", "steps_in_flight",
                     "tile_tokens", "max_step_tokens", "max_blocks", "chosen")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("device", "max_running", "step_tokens", "queue_length", "kv_dtype", "steps_in_flight", "tile_tokens"),
    [(CPU, 64, 512, 256, "f16", 1, 12), (CUDA, 256, 4096, 1024, "bf16", 2, 64)],
)
def test_values_that_are_left_open(
    device: ChosenDevice, max_running: int, step_tokens: int, queue_length: int, kv_dtype: str, steps_in_flight: int,
    tile_tokens: int,
) -> None:  # fmt: skip
    config = resolve_config(SPEC, EngineConfig(), device, float32_weights=False)
    assert derived(config) == {
        "threads": 5, "context_length": 4096, "max_running": max_running, "queue_length": queue_length,
        "kv_dtype": kv_dtype, "steps_in_flight": steps_in_flight, "tile_tokens": tile_tokens,
        "max_step_tokens": step_tokens, "max_blocks": 4096 // 32 + 1, "chosen": device,
    }  # fmt: skip


@pytest.mark.parametrize(("max_running", "expected"), [(5000, 5000), (9, 4096)])
def test_a_step_has_room_for_a_token_of_every_row(max_running: int, expected: int) -> None:
    config = resolve_config(SPEC, EngineConfig(max_running=max_running), CUDA, float32_weights=False)
    assert config.max_step_tokens == expected


@pytest.mark.parametrize(("device", "steps_in_flight", "tile_tokens"), [(CPU, 1, 12), (CUDA, 2, 64)])
def test_values_that_are_given(device: ChosenDevice, steps_in_flight: int, tile_tokens: int) -> None:
    """They are the same on both; drafts change nothing of what a device has in flight."""
    config = resolve_config(SPEC, GIVEN, device, float32_weights=True)
    assert derived(config) == {
        "threads": 3, "context_length": 100, "max_running": 7, "queue_length": 5, "kv_dtype": "int8",
        "steps_in_flight": steps_in_flight, "tile_tokens": tile_tokens, "max_step_tokens": 48, "max_blocks": 3,
        "chosen": device,
    }  # fmt: skip
    for field in fields(EngineConfig):
        assert getattr(config, field.name) == getattr(GIVEN, field.name), field.name


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("weights", "expected"), [("F32", True), ("F16", False), ("Q8_0", False)])
def test_float32_weights_have_a_float32_cache(kind: Device, weights: str, expected: bool) -> None:
    spec, checkpoint = random_model(Recipe(weights=weights, windows=(None,)))
    float32 = WeightTensors(spec, checkpoint).are_float32(spec.linears())
    assert float32 is expected
    dtype = resolve_config(spec, EngineConfig(), ChosenDevice(kind), float32_weights=float32).kv_dtype
    assert (dtype == "f32") is expected


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("capability", [(0, 0), (8, 9), (9, 0), (10, 0)])
def test_prompts_are_in_fp8_where_the_checkpoint_asks_and_the_card_does_it(
    capability: tuple[int, int], invariant: bool, asks: bool
) -> None:
    device = replace(CUDA, capability=capability)
    config = EngineConfig(batch_invariant=invariant)
    found = resolve_config(SPEC, config, device, float32_weights=False, fp8_activations=asks)
    assert found.prompt_dtype == ("fp8" if asks and capability == (9, 0) and not invariant else "f16")
    given = replace(config, prompt_dtype="f16")
    assert resolve_config(SPEC, given, device, float32_weights=False, fp8_activations=asks).prompt_dtype == "f16"


def test_a_context_beyond_the_models_is_cut_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert (
            resolve_config(SPEC, EngineConfig(context_length=4096), CPU, float32_weights=False).context_length == 4096
        )
        assert not caplog.records
        config = resolve_config(SPEC, EngineConfig(context_length=5000), CPU, float32_weights=False)
    assert config.context_length == 4096
    assert "the context is 4096 tokens, which is all that the model has; 5000 were asked for" in caplog.text


def test_a_resolved_value_out_of_range_is_refused_as_a_given_one() -> None:
    config = resolve_config(SPEC, EngineConfig(), CPU, float32_weights=False)
    with pytest.raises(InvalidRequestError, match="max_running must be between 1 and 65536, not 0"):
        replace(config, max_running=0)
