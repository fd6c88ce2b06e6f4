"""The waits of prompts beside running streams, on a machine whose step times are made up here."""

from __future__ import annotations

import itertools
import statistics

import pytest

from realizar.batch import ScheduledBatch
from realizar.scheduler.pace import Pace
from scheduler.timed_runs import Run, ids
from step_inputs import ScheduledRow, rows_of, step_rows

SIZES = (16, 32, *range(64, 513, 64))
PADDED_TOKEN_S = 1e-4


def padded_step_s(batch: ScheduledBatch) -> float:
    """The seconds of a step of a device that pads its tokens to one of SIZES, unless it only decodes."""
    if batch.num_tokens == batch.num_decode_tokens:
        return 2e-3
    return 2e-3 + PADDED_TOKEN_S * next(size for size in SIZES if size >= batch.num_tokens)


def first_tokens_s(run: Run, count: int, length: int) -> list[float]:
    """The seconds that prompts, all added at once, wait for their first token."""
    came_s = run.now_s
    for number in range(count):
        run.add(f"short {number}", ids(length, 1000 + number), 40)
    while not all(run.tokens_s[f"short {number}"] for number in range(count)):
        run.step()
    return [run.tokens_s[f"short {number}"][0] - came_s for number in range(count)]


@pytest.mark.parametrize("streams", [1, 8, 24])
def test_short_prompts_that_come_at_once_wait_no_more_than_streams_are_worth(streams: int) -> None:
    """Streams keep two fifths of the time: 64 prompts wait at most 2.5 times as long as they would without pacing."""
    waits = first_tokens_s(Run(Pace(2.5, 12)).started(streams), 64, 30)
    least = first_tokens_s(Run(None).started(streams), 64, 30)
    assert max(waits) < 2.5 * max(least)
    assert statistics.median(waits) < 2.5 * statistics.median(least)
    assert sorted(waits) == waits  # in their order, so that none is passed over


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    run = Run(Pace(2.5, 12)).started(8)
    run.add("long", ids(4000, 50), 1)
    for _ in range(20):
        run.step()
    waits = first_tokens_s(run, 8, 30)
    assert not run.tokens_s["long"]
    assert max(waits) < 0.75
    while not run.tokens_s["long"]:
        run.step()
    gaps = [later - earlier for earlier, later in itertools.pairwise(run.tokens_s["stream 0"])]
    assert max(gaps) < 4.0 * statistics.median(gaps)


def test_a_prompt_with_a_long_cached_prefix_starts_with_fewer_tokens() -> None:
    """Tokens at 3,900 take six times as long as the first ones: known from the prompt that left its blocks."""
    run = Run(Pace(2.5, 12)).started(4)
    run.add("long", ids(3990, 50), 1)
    while not run.tokens_s["long"]:
        run.step()
    near_s = first_tokens_s(run, 4, 200)
    assert max(near_s) < 4
    while len(run.scheduler._open.running) > 4:
        run.step()
    alone_s = 2.8e-3 + 4 * (5.5e-4 + 7e-7 * 2000)
    run.add("again", (*ids(3990, 50), *range(5000, 5200)), 1)
    before_s = run.now_s
    rows = run.step()
    if len(rows) == 4:  # decodes were measured
        before_s = run.now_s
        rows = run.step()
    assert len(rows) == 5
    assert rows[-1].num_computed_tokens == 3984
    assert run.now_s - before_s < 3.0 * alone_s


def test_steps_of_the_devices_sizes_read_prompts_sooner() -> None:
    """12 ms hold 100 padded tokens, between two sizes: steps of 64 and 128 tokens lose none to padding."""
    took_s, sizes = [], []
    for known in ((), SIZES):
        run = Run(Pace(2.5, 64, 0.012, known), padded_step_s).started(8)
        run.add("long", ids(4000, 50), 1)
        began_s, steps = run.now_s, []
        while not run.tokens_s["long"]:
            steps.append(sum(row.num_tokens for row in run.step()))
        took_s.append(run.now_s - began_s)
        sizes.append(steps)
    assert all(size in (*SIZES, 8) for size in sizes[1][:-2])
    assert took_s[1] < 0.9 * took_s[0]
    assert max(sizes[1]) <= 128


def far_step_s(batch: ScheduledBatch) -> float:
    """The seconds of a step of a padding device whose prompt tokens also take their share of what is before them."""
    prompts = [row for row in rows_of(batch) if not row.sample or row.num_tokens > 1]
    return padded_step_s(batch) + sum(row.num_tokens * 1e-7 * row.num_computed_tokens for row in prompts)


def test_far_behind_a_step_is_not_filled_up() -> None:
    """Once a token's attention costs thrice what padding does, filling a step up to the next size makes it longer.

    12 ms hold 25 to 35 tokens there, beside 8 decodes: between the sizes of 32 and 64.
    """
    run = Run(Pace(2.5, 64, 0.012, SIZES), far_step_s).started(8)
    run.add("long", ids(4000, 50), 1)
    far_s: list[float] = []
    while not run.tokens_s["long"]:
        before_s, rows = run.now_s, run.step()
        if rows[-1].num_computed_tokens > 2200:
            far_s.append(run.now_s - before_s)
    assert len(far_s) > 40
    assert max(far_s[8:]) < 1.15 * 0.012


def test_a_chunk_of_one_token_is_a_prompt_all_the_same() -> None:
    """If it counted as a decode, steps of decodes would seem longer than they are."""
    row = ScheduledRow(0, 0, (5,), 100, sample=False)
    decode = ScheduledRow(1, 1, (6,), 40, sample=True)
    batch = ScheduledBatch(step_rows([decode, row, ScheduledRow(2, 2, (1, 2, 3), 200, sample=True)]))
    assert (batch.num_decode_tokens, batch.num_tokens, batch.prompt_position) == (1, 5, 175)
    assert ScheduledBatch(step_rows([decode])).prompt_position == 0
