"""States and snapshots in the memory of a plan and of a load, which agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpu_runs import Runner
from random_models import Recipe, random_model
from realizar.backends.cpu.kv.memory import KVSizes
from realizar.backends.cpu.plan import plan_memory
from realizar.backends.cpu.state.sizes import LayerState, layer_states, state_sizes
from realizar.cli.commands.plan import states_lines
from realizar.config import EngineConfig
from resolving import resolved

CONFIG = EngineConfig(threads=1, context_length=512, max_running=3, max_step_tokens=64, speculative_tokens=4)
CONVOLUTIONS = Recipe(windows=(None,) * 3, recurrent=("convolution", None, "convolution"), length=3)
DELTA = Recipe(windows=(None,) * 2, recurrent=("delta",), value_heads=8, key_size=64, value_size=64)
SLOT, REPLAY = 2 * 4 * 2 * 256, 2 * 4 * 5 * 256  # bytes: two layers of two inputs, of 5 tokens


def test_a_plan_says_what_a_load_takes() -> None:
    spec, checkpoint = random_model(CONVOLUTIONS)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG))
    runner = Runner(spec, checkpoint, CONFIG)
    states, kv = runner.backend.model.states, runner.backend.model.kv
    assert plan.state_bytes == SLOT + REPLAY == states.sizes.row_bytes
    assert plan.num_snapshots == runner.capacity.num_snapshots > 0
    assert plan.snapshot_bytes == plan.num_snapshots * SLOT
    assert states.size_bytes == 3 * plan.state_bytes + plan.snapshot_bytes
    blocks = plan.kv_limit_bytes - plan.snapshot_bytes
    assert blocks - sum(KVSizes(spec, resolved(spec, checkpoint, CONFIG)).block_bytes) < kv.size_bytes <= blocks
    runner.close()


@pytest.mark.parametrize("recipe", [CONVOLUTIONS, DELTA], ids=["small-states", "large-states"])
def test_the_share_of_snapshots(recipe: Recipe) -> None:
    """One for each 256 tokens that fit beside them, or half of the bytes; never the room of one request."""
    spec, checkpoint = random_model(recipe)
    sizes = KVSizes(spec, resolved(spec, checkpoint, CONFIG))
    limit = 100 * sizes.request_bytes
    count = sizes.num_snapshots(limit)
    left = limit - count * sizes.snapshot_bytes
    if recipe is DELTA:
        assert left - sizes.snapshot_bytes < limit / 2 <= left
    else:
        tokens = left / sum(sizes.block_bytes) * sizes.block_size
        assert count == pytest.approx(tokens / 256, rel=0.01)
    assert sizes.num_snapshots(sizes.request_bytes) == 0
    assert sizes.num_snapshots(sizes.request_bytes + sizes.snapshot_bytes) == 1
    none = KVSizes(spec, resolved(spec, checkpoint, replace(CONFIG, prefix_cache=False)))
    assert (none.num_snapshots(limit), none.snapshot_share) == (0, 0)


def test_snapshots_on_the_host_are_those_asked_for() -> None:
    """By default there are none; they lie beside the cache."""
    spec, checkpoint = random_model(CONVOLUTIONS)
    without = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG))
    assert (without.num_host_snapshots, without.host_snapshot_bytes) == (0, 0)
    kept = replace(CONFIG, max_running=64, kv_cache_bytes=1 << 30)
    assert plan_memory(spec, checkpoint, resolved(spec, checkpoint, kept)).num_host_snapshots == 0
    config = replace(CONFIG, host_snapshot_bytes=5 * SLOT + 1)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, config))
    assert (plan.num_host_snapshots, plan.host_snapshot_bytes) == (5, 5 * SLOT)
    assert (plan.num_snapshots, plan.contexts) == (without.num_snapshots, without.contexts)
    runner = Runner(spec, checkpoint, config)
    assert runner.capacity.num_host_snapshots == 5
    states = runner.backend.model.states
    assert states.size_bytes == 3 * plan.state_bytes + plan.snapshot_bytes + 5 * SLOT
    assert states.time_fetch() > 0
    runner.close()


def test_sizes_of_layers() -> None:
    """A delta net has 2 heads of q and k and 8 of v, all of 64, a convolution of 4 tokens, beta and decay."""
    spec, _ = random_model(DELTA)
    channels = (2 + 2 + 8) * 64
    assert layer_states(spec) == {0: LayerState(3 * channels + 8 * 64 * 64, channels + 16)}
    assert state_sizes(spec, 0).replay_bytes == 4 * (channels + 16)


def test_the_line_of_a_plan() -> None:
    spec, checkpoint = random_model(CONVOLUTIONS)
    plan = plan_memory(spec, checkpoint, resolved(spec, checkpoint, CONFIG))
    assert states_lines(replace(plan, num_snapshots=123, snapshot_bytes=2_400_000), 64) == [
        "states       14.3 kB a row of 64, 123 snapshots of 2.4 MB in the KV cache"
    ]
    on_host = replace(
        plan, num_snapshots=123, snapshot_bytes=2_400_000, num_host_snapshots=500, host_snapshot_bytes=9_750_000
    )
    assert states_lines(on_host, 1)[0].endswith(" 2.4 MB in the KV cache, 500 of 9.8 MB in the host's memory")
    assert states_lines(replace(plan, num_snapshots=0), 1) == ["states       14.3 kB a row of 1, no snapshots"]
    assert states_lines(replace(plan, state_bytes=0), 1) == []
