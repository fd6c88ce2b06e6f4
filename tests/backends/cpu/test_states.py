"""States of rows on the CPU: tokens that are computed again, rows that are used again, and snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu.cpu_rows import Part, forward_input, run_step
from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.inspection.backend import InspectedCPUBackend
from realizar.backends.cpu.state.memory import StateMemory
from realizar.backends.cpu.state.sizes import LayerState, StateSizes
from realizar.batch import StateMoves
from realizar.config import EngineConfig
from resolving import resolved
from step_inputs import scheduled_row, step_rows

RECIPES = {
    "delta": Recipe(vocab_size=96, windows=(None,) * 3, recurrent=("delta", None, "delta")),
    "convolutions": Recipe(
        vocab_size=96, windows=(None,) * 3, recurrent=("convolution", None, "convolution"), length=3
    ),
    "long-convolutions": Recipe(vocab_size=96, windows=(None,) * 2, recurrent=("convolution",), length=9),
    "delta-nets": Recipe(
        vocab_size=96,
        windows=(None,) * 3,
        recurrent=("delta", None, "delta"),
        weights="Q8_0",
        parts=("output_gate", "tiled"),
    ),
}
TOKENS = random_tokens(RECIPES["convolutions"], 40)


@pytest.fixture(scope="module", params=RECIPES)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    config = EngineConfig(threads=2, max_running=4, max_step_tokens=64, kv_cache_bytes=32 << 20, speculative_tokens=5)
    made = Runner(*random_model(RECIPES[request.param]), config)
    yield made
    made.close()


def logits_of(runner: Runner, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
    """Logits of each part's last token."""
    run_step(runner, [replace(part, sample=False) for part in parts])
    ends = np.cumsum([len(part.tokens) + len(part.drafts) for part in parts]) - 1
    return [runner.read_logits([int(end)])[0] for end in ends]


def expected(runner: Runner, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Of the last token, all tokens read at once by a row of its own."""
    return logits_of(runner, [Part(3, tokens)])[0]


@pytest.mark.parametrize("first", [1, 2, 3, 7])
def test_tokens_that_are_computed_again_leave_no_trace(runner: Runner, first: int) -> None:
    """A row that is deferred twice, with refused drafts beside, then goes on with others; the first token too."""
    logits_of(runner, [Part(0, TOKENS[:first], may_repeat=True)])
    again = Part(0, TOKENS[first - 1 : first], first - 1, drafts=[5, 6, 7], may_repeat=True)
    for _ in range(2):
        logits_of(runner, [Part(1, TOKENS[:9]), again])
    found = logits_of(runner, [Part(0, TOKENS[first - 1 : first + 3], first - 1)])
    assert (found[0] == expected(runner, TOKENS[: first + 3])).all()


@pytest.mark.parametrize("accepted", range(6))
def test_drafts_that_were_right_are_not_computed_again(runner: Runner, accepted: int) -> None:
    drafts = [*TOKENS[11 : 11 + accepted], *([90] * (5 - accepted))]
    logits_of(runner, [Part(0, TOKENS[:10])])
    logits_of(runner, [Part(0, TOKENS[10:11], 10, drafts=drafts)])
    following = 11 + accepted
    found = logits_of(runner, [Part(0, TOKENS[following : following + 1], following, drafts=[1, 2])])
    assert found[0].shape == (96,)
    found = logits_of(runner, [Part(0, TOKENS[following + 1 : following + 2], following + 1)])
    assert (found[0] == expected(runner, TOKENS[: following + 2])).all()


def test_a_row_that_is_used_again_begins_from_zeros(runner: Runner) -> None:
    """After a sequence that left uncertain tokens behind, and after a preemption, in chunks and at once."""
    wanted = expected(runner, TOKENS[20:30])
    logits_of(runner, [Part(2, TOKENS[:12], drafts=[4, 5])])
    runner.backend.close(2)
    assert (logits_of(runner, [Part(2, TOKENS[20:30])])[0] == wanted).all()
    logits_of(runner, [Part(2, TOKENS[20:23])])
    assert (logits_of(runner, [Part(2, TOKENS[23:30], 3)])[0] == wanted).all()


def test_a_snapshot_is_the_state_where_it_was_taken(runner: Runner) -> None:
    """Taken at the end of a chunk of one row, restored by that row and others after both have gone on."""
    most = runner.capacity.num_snapshots
    assert most > 3
    chunk = forward_input(runner, [Part(0, TOKENS[:8], sample=False), Part(1, TOKENS[5:9], sample=False)], 6)
    moves = StateMoves(taken=((0, most - 1), (1, 0)))
    runner.backend.submit(replace(chunk, state_moves=moves)).result()
    wanted = expected(runner, TOKENS[:15])
    logits_of(runner, [Part(0, TOKENS[20:30], 8)])
    step = forward_input(runner, [Part(0, TOKENS[8:15], 8, sample=False)], 6)
    runner.backend.submit(replace(step, state_moves=StateMoves(restored=((0, most - 1),)))).result()
    assert (runner.read_logits([6])[0] == wanted).all()


def test_a_step_of_a_row_that_has_gone_elsewhere_is_refused(runner: Runner) -> None:
    logits_of(runner, [Part(0, TOKENS[:8], drafts=[1, 2])])
    for part in (Part(0, TOKENS[:1], 7), Part(0, TOKENS[:1], 11), Part(0, TOKENS[:2], 8, drafts=[1] * 7)):
        with pytest.raises(RuntimeError, match="row 0 goes on at"):
            logits_of(runner, [part])
    logits_of(runner, [Part(0, TOKENS[8:9], 8)])
    step = forward_input(runner, [Part(0, TOKENS[9:10], 9, drafts=[1, 2])], 6)
    with pytest.raises(RuntimeError, match="a snapshot of row 0 is wanted, and 2 of its tokens are uncertain"):
        runner.backend.submit(replace(step, state_moves=StateMoves(taken=((0, 0),))))


def test_a_step_that_is_measured_may_begin_anywhere(runner: Runner) -> None:
    """And again at the same place; the backend that runs texts refuses it, as the test above says."""
    inspected = InspectedCPUBackend()
    spec, checkpoint = random_model(Recipe(vocab_size=96, windows=(None, None), recurrent=("convolution",), length=3))
    inspected.load(spec, checkpoint, resolved(spec, checkpoint, runner.config))
    step = forward_input(runner, [Part(0, TOKENS[:4], 20), Part(1, TOKENS[:4], 20)], 6)
    step = replace(step, slot_mapping=step.slot_mapping[:1], block_tables=step.block_tables[:1])
    for part in (*inspected.time_parts(step, 1), *inspected.time_parts(step, 1)):
        assert part.seconds >= 0
    inspected.shutdown()


def test_every_layer_has_memory_of_its_own() -> None:
    layers = {1: LayerState(32, 16), 4: LayerState(48, 32)}
    memory = StateMemory(StateSizes(layers, 3), max_rows=2, num_snapshots=5)
    assert (memory.sizes.slot_bytes, memory.sizes.replay_bytes) == (320, 3 * 192)
    assert memory.size_bytes == 7 * 320 + 2 * 3 * 192
    assert memory.state_address(4) - memory.state_address(1) == 128
    assert memory.replay_address(4) - memory.replay_address(1) == 3 * 64
    memory.begin(step_rows([scheduled_row(1, (5, 6, 7)), scheduled_row(0, (1, 2), drafts=(3,))]), StateMoves())
    assert memory.rows.tolist() == [[0, 3, 1, 1, 0, 0], [3, 3, 0, 1, 0, 1]]
    memory.begin(step_rows([scheduled_row(0, (7,), 3), scheduled_row(1, (), 3)]), StateMoves())
    assert memory.rows.tolist() == [[0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0]]


def test_a_model_without_states_has_none() -> None:
    recipe = Recipe(windows=(None,))
    runner = Runner(*random_model(recipe), EngineConfig(threads=1, max_running=1, kv_cache_bytes=8 << 20))
    assert runner.capacity.num_snapshots == 0
    assert runner.backend.model.states.size_bytes == 0
    runner.close()
