"""The operations that threads walk, in order, by the names that profiles give them; and where threads meet."""

from __future__ import annotations

import pytest

from backends.cpu_runs import Runner
from random_models import Recipe, random_model
from realizar.config import EngineConfig

CONFIG = EngineConfig(threads=2, max_running=1, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64)
LACKING = (None, "feed_forward", "mixer")
ROWS = ["row norm", "row norm"]


@pytest.mark.parametrize("parts", [(), ("row_norm", "post_norms")], ids=["plain", "norms"])
def test_operations_of_every_block(parts: tuple[str, ...]) -> None:
    """A norm after a branch is an operation of its own, and adds to the stream."""
    spec, checkpoint = random_model(Recipe(32, 2, 1, 64, 96, 48, (None,) * 3, "Q8_0", parts, lacking=LACKING))
    runner = Runner(spec, checkpoint, CONFIG)
    body, tail = runner.backend.programs
    runner.close()
    after, rows = (["norm"], ROWS) if parts else ([], [])
    mixer = ["norm", "qkv", "qkv", "qkv", *rows, "rope", "attention", "join", "output", *after]
    feed_forward = ["norm", "gate and up", "gate and up", "activation", "down", *after]
    assert [operation.part for operation in body.operations] == [*mixer, *feed_forward, *mixer, *feed_forward]
    begins = [index for index, operation in enumerate(body.operations) if operation.begins_block]
    both = len(mixer) + len(feed_forward)
    assert begins == [0, len(mixer), both, both + len(mixer)]
    assert [operation.part for operation in tail.operations] == ["select", "final norm", "head"]
    assert body.table[:, 2].tolist() == [operation.barrier for operation in body.operations]


@pytest.mark.parametrize(("weights", "ups"), [("Q8_0", 2), ("F32", 1)])
def test_threads_meet_unless_each_goes_on_with_what_it_computed(weights: str, ups: int) -> None:
    """Matmuls of one input follow each other without a barrier; quantised gate and up need none either."""
    spec, checkpoint = random_model(Recipe(32, 2, 1, 64, 96, 48, (None,), weights))
    runner = Runner(spec, checkpoint, CONFIG)
    body, _ = runner.backend.programs
    runner.close()
    assert [each.part for each in body.operations if not each.barrier] == ["qkv", "qkv", *["gate and up"] * ups]
