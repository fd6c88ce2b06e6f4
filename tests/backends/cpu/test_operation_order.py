"""The operations that threads walk, in order, by the names that profiles give them; and where threads meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cpu_runs import Runner
from random_models import Recipe, random_model
from realizar.backends.cpu import load
from realizar.backends.program import Program, build_program
from realizar.config import EngineConfig
from realizar.models.spec import ModelSpec

CONFIG = EngineConfig(threads=2, max_running=1, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64)
LACKING = (None, "feed_forward", "mixer")
QK_NORMS = ["qk norm", "qk norm"]


@pytest.mark.parametrize("parts", [(), ("token_norm", "post_norms")], ids=["plain", "norms"])
def test_operations_of_every_block(parts: tuple[str, ...]) -> None:
    """A norm after a branch is an operation of its own, and adds to the stream."""
    spec, checkpoint = random_model(Recipe(32, 2, 1, 64, 96, 48, (None,) * 3, "Q8_0", parts, lacking=LACKING))
    runner = Runner(spec, checkpoint, CONFIG)
    body, tail = runner.backend.programs
    runner.close()
    after, qk_norms = (["norm"], QK_NORMS) if parts else ([], [])
    mixer = ["norm", "qkv", "qkv", "qkv", *qk_norms, "rope", "attention", "attention output", "output", *after]
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


def unfused(spec: ModelSpec, hidden_layers: Sequence[int] = ()) -> Program:
    """A model's program whose blocks decline every fusion."""
    program = build_program(spec, hidden_layers)
    blocks = [
        replace(
            block,
            inputs=replace(block.inputs, gated=None),
            join=replace(block.join, adds_directly=False, folds_next_norm=False),
        )
        for block in program.blocks
    ]
    return replace(program, blocks=tuple(blocks))


@pytest.mark.parametrize("weights", ["Q8_0", "F32"])
def test_blocks_that_decline_fusion_get_operations_of_their_own(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is added to after each matmul, threads meet before the activation, and logits stay the same."""
    spec, checkpoint = random_model(Recipe(32, 2, 1, 64, 96, 48, (None,) * 2, weights))
    tokens = np.arange(1, 9).tolist()
    fused = Runner(spec, checkpoint, CONFIG)
    expected = fused.logits(tokens)
    fused.close()
    monkeypatch.setattr(load, "build_program", unfused)
    runner = Runner(spec, checkpoint, CONFIG)
    body, _ = runner.backend.programs
    logits = runner.logits(tokens)
    runner.close()
    mixer = ["norm", "qkv", "qkv", "qkv", "rope", "attention", "attention output", "output", "residual add"]
    feed_forward = ["norm", "gate and up", "gate and up", "activation", "down", "residual add"]
    assert [operation.part for operation in body.operations] == [*mixer, *feed_forward] * 2
    unmet = [operation.part for operation in body.operations if not operation.barrier]
    assert unmet == ["qkv", "qkv", "gate and up"] * 2
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))
