"""The memory of states in a plan and in a load, and steps of models with states that are measured again and again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends import kv_blocks, select  # noqa: E402
from realizar.backends.cuda.attention.kv_memory import KVMemory  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile, interpreter_device  # noqa: E402
from realizar.backends.cuda.inspection.backend import InspectedCUDABackend  # noqa: E402
from realizar.backends.cuda.plan import plan_memory  # noqa: E402
from realizar.backends.cuda.recurrences.memory import rows_within, slot_bytes  # noqa: E402
from realizar.backends.cuda.supported import SUPPORTED  # noqa: E402
from realizar.backends.devices import ChosenDevice  # noqa: E402
from realizar.cli.commands.plan import states_lines  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import CapacityError, UnsupportedModelError  # noqa: E402
from resolving import resolved  # noqa: E402
from step_inputs import scheduled_row, step_input  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted only where there is no GPU")

RECIPE = Recipe(
    32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="F32", windows=(None,) * 2,
    recurrent=("delta",), value_heads=4, key_size=16, value_size=16,
)  # fmt: skip
CONFIG = EngineConfig(
    threads=1, max_running=3, max_step_tokens=32, context_length=256, speculative_tokens=2, kv_cache_bytes=1 << 20
)
CHANNELS = (2 + 2 + 4) * 16
SLOT = 4 * (4 * 16 * 16 + 7 * (CHANNELS + 2 * 4))  # a ring of 7: three before, three that may be undone, and one more


def test_a_plan_says_what_a_load_takes() -> None:
    spec, checkpoint = random_model(RECIPE)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"), 1 << 30)
    runner = GPURunner(spec, checkpoint, CONFIG)
    states, kv = runner.backend.model.states, runner.backend.model.kv
    assert plan.state_bytes == SLOT
    assert plan.num_snapshots == runner.capacity.num_snapshots > 0
    assert plan.snapshot_bytes == plan.num_snapshots * SLOT
    assert states.size_bytes == 3 * SLOT + plan.snapshot_bytes
    assert kv.size_bytes + plan.snapshot_bytes <= plan.kv_limit_bytes == 1 << 20
    longest = plan.contexts[-1]
    assert longest.num_requests == (plan.kv_limit_bytes - plan.snapshot_bytes) // longest.request_bytes
    assert "a row of 3, " in states_lines(plan, 3)[0]
    assert "snapshots of" in states_lines(plan, 3)[0]
    runner.close()
    none = replace(resolved(spec, checkpoint, CONFIG, "cuda"), prefix_cache=False)
    assert plan_memory(spec, checkpoint, none, 1 << 30).num_snapshots == 0


def test_rows_by_default_leave_two_thirds_of_the_memory() -> None:
    """As many as of other models, or half of them and so on, beside the weights; a number that is configured stays."""
    spec, _ = random_model(RECIPE)
    config = replace(CONFIG, device="cuda", max_running=None)
    least = 3 * SLOT  # for one row
    for left, rows in (
        (1000 * least, 256),
        (256 * least, 256),
        (256 * least - 1, 128),
        (9 * least, 8),
        (0, 1),
        (-5, 1),
    ):
        assert rows_within(spec, config, left) == rows
    without = random_model(replace(RECIPE, recurrent=()))[0]
    assert rows_within(without, config, 0) == 256


def test_a_model_is_resolved_with_the_rows_that_its_memory_has(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint = random_model(RECIPE)
    monkeypatch.setattr(select, "build_spec", lambda *_: spec)
    monkeypatch.setattr(select, "_free_on_gpu", lambda _: checkpoint.size_bytes + 3 * 16 * SLOT)
    config = replace(CONFIG, device="cuda", max_running=None)
    found = [
        select.resolve_model(checkpoint, each, device, memory)[1].max_running
        for each, device, memory in (
            (config, ChosenDevice("cuda"), None),
            (config, ChosenDevice("cuda"), checkpoint.size_bytes + 3 * 64 * SLOT),
            (replace(config, max_running=200), ChosenDevice("cuda"), None),
            (config, ChosenDevice("cpu"), None),
        )
    ]
    assert found == [16, 64, 200, 64]


def test_states_that_do_not_fit_are_named() -> None:
    """Neither the context nor the cache is at fault."""
    spec, checkpoint = random_model(replace(RECIPE, key_size=64, value_size=64))
    config = replace(resolved(spec, checkpoint, CONFIG, "cuda"), max_running=20_000)
    with pytest.raises(CapacityError, match=r"^the states of 20000 rows take .* free: lower max_running; each takes"):
        KVMemory(spec, config, interpreter_device(), 0, slot_bytes(spec, config))
    plan = plan_memory(spec, checkpoint, config, 1 << 30)
    for check in (plan.check_weights_fit, plan.check_one_fits):
        with pytest.raises(CapacityError, match=r"for its state: lower max_running$"):
            check()


def test_a_configured_cache_leaves_room_for_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that alone would fit is refused where the states of all rows do not fit beside it."""
    spec, checkpoint = random_model(RECIPE)
    config = resolved(spec, checkpoint, CONFIG, "cuda")
    module = "realizar.backends.cuda.attention.kv_memory.free_bytes"
    device, state = interpreter_device(), slot_bytes(spec, config)
    taken = KVMemory(spec, config, device, 0, 0).size_bytes
    monkeypatch.setattr(DeviceProfile, "is_gpu", True)
    monkeypatch.setattr(module, lambda _device: taken + (1 << 19))
    KVMemory(spec, config, device, 0, state)
    monkeypatch.setattr(module, lambda _device: taken + 3 * state - (1 << 16))
    with pytest.raises(CapacityError, match="the KV cache needs"):
        KVMemory(spec, config, device, 0, state)


def test_snapshots_on_the_host_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an eighth of the host's free memory, divided by the engines there, that the cache has blocks for."""
    spec, checkpoint = random_model(replace(RECIPE, value_heads=16, key_size=64, value_size=64, context_length=8192))
    wanted = replace(CONFIG, max_running=64, context_length=8192, kv_cache_bytes=64 << 20)
    state = slot_bytes(spec, wanted)
    free = 8 * 40 * state
    monkeypatch.setattr(kv_blocks, "free_memory_bytes", lambda: free)

    def count(**options: Any) -> int:
        settled = resolved(spec, checkpoint, replace(wanted, **options), "cuda")
        plan = plan_memory(spec, checkpoint, settled, 1 << 30)
        assert plan.host_snapshot_bytes == plan.num_host_snapshots * state
        assert KVMemory(spec, settled, interpreter_device(), 0, state).num_host_snapshots == plan.num_host_snapshots
        return plan.num_host_snapshots

    assert count() == 40
    assert [count(host_sharers=each) for each in (2, 8, 10, 11)] == [20, 5, 4, 0]
    assert count(host_snapshot_bytes=0) == count(prefix_cache=False) == 0
    assert count(host_snapshot_bytes=41 * state, host_sharers=8) == 41
    free = 1 << 50
    useful = (64 << 19) // (256 * 2 * 32 * 4)  # half of the cache is of blocks, and 256 tokens of float32 are so much
    assert useful <= count() <= useful + 2
    monkeypatch.setattr(kv_blocks, "_MOST_ON_HOST", 30 * state)
    assert count() == 30


def test_no_snapshots_on_the_host_where_the_device_has_one_for_each_256_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, checkpoint = random_model(replace(RECIPE, context_length=8192))
    monkeypatch.setattr(kv_blocks, "free_memory_bytes", lambda: 1 << 40)
    wanted = replace(CONFIG, max_running=64, context_length=8192, kv_cache_bytes=64 << 20)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, wanted, "cuda"), 1 << 30)
    assert plan.num_snapshots > 800
    assert plan.num_host_snapshots == 0


@pytest.mark.parametrize(("is_integrated", "expected"), [(True, 0), (False, None)])
def test_a_gpu_in_the_hosts_memory_keeps_its_snapshots(
    is_integrated: bool, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that is configured; a model without states has nothing to decide."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(is_integrated=is_integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    config = replace(CONFIG, device="cuda")
    for recipe, given, device, found in (
        (RECIPE, config, ChosenDevice("cuda"), expected),
        (RECIPE, config, ChosenDevice("cuda", 1), None),
        (RECIPE, replace(config, host_snapshot_bytes=7), ChosenDevice("cuda"), 7),
        (replace(RECIPE, recurrent=()), config, ChosenDevice("cuda"), None),
        (RECIPE, config, ChosenDevice("cpu"), None),
    ):
        spec, checkpoint = random_model(recipe)
        monkeypatch.setattr(select, "build_spec", lambda *_, spec=spec: spec)
        assert select.resolve_model(checkpoint, given, device, 1 << 30)[1].host_snapshot_bytes == found


@pytest.mark.parametrize("part", ["key_size", "value_size"])
def test_wide_heads_are_refused(part: str) -> None:
    """A tile of heads of 256 in float32 takes 262 kB of shared memory on a card of 9.0, which has 227."""
    sizes = {"key_size": 128, "value_size": 128}
    SUPPORTED.check(random_model(replace(RECIPE, **sizes))[0])
    with pytest.raises(UnsupportedModelError, match="heads have more than 128 features"):
        SUPPORTED.check(random_model(replace(RECIPE, **{**sizes, part: 256}))[0])


def test_measured_steps_begin_where_they_say() -> None:
    """Each repetition of a decode at any position applies one token, and none of those before it."""
    spec, checkpoint = random_model(RECIPE)
    backend = InspectedCUDABackend(device=interpreter_device())
    backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, "cuda"))
    step = step_input([scheduled_row(1, [3], 40)], [np.array([40], np.int32)], [np.arange(3, dtype=np.int32)[None]])
    for _ in range(2):
        backend.submit(step).result()
        backend.launches(step)
        row = backend.model.space.arrays["recurring"][:7].tolist()
        assert row == [1, 0, 1, 0, 1, 40, 0], "slot, start, count, nothing to replay, certain, position, not scanned"
    backend.shutdown()
