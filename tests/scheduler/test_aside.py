"""A prompt that is read aside, on a device whose step times are made up: what it gains, and what it costs streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from realizar.batch import AsideSizes, ScheduledBatch
from realizar.scheduler.pace import Pace
from scheduler.timed_runs import Run, ids

SIZES = AsideSizes(parts=25, tokens=800, beside=64)
DECODE_S, CHUNK_S, TOKEN_S = 5e-3, 10e-3, 5e-5


def mixture_s(batch: ScheduledBatch, chunk_s: float = CHUNK_S) -> float:
    """The seconds of a step of a mixture: a few tokens of a prompt read all experts, which decodes alone do not."""
    prompts = batch.num_tokens - batch.num_decode_tokens
    seconds = DECODE_S if not prompts else chunk_s + TOKEN_S * prompts
    if (aside := batch.aside) is not None:
        seconds += (2e-3 + TOKEN_S * (SIZES.beside + aside.num_tokens)) * aside.num_parts / SIZES.parts
    return seconds


def dense_s(batch: ScheduledBatch) -> float:
    """The same of a dense model, whose weights a step reads in any case."""
    return mixture_s(batch, DECODE_S)


def read(
    aside: AsideSizes | None, streams: int, seconds: Callable[[ScheduledBatch], float] = mixture_s
) -> tuple[float, list[float], Run]:
    """Seconds until a prompt of 4,000 tokens has its first token, a stream's gaps meanwhile, and the run."""
    run = Run(Pace(3.5, 64), seconds, aside=aside).started(streams)
    run.add("long", ids(4000, 50), 4)
    came_s = run.now_s
    while not run.tokens_s["long"]:
        run.step()
    times = [each for each in run.tokens_s["stream 0"] if each >= came_s - DECODE_S]
    return run.tokens_s["long"][0] - came_s, [later - earlier for earlier, later in itertools.pairwise(times)], run


@pytest.mark.parametrize("streams", [1, 8, 30])
def test_a_long_prompt_is_read_sooner(streams: int) -> None:
    """A step of both takes 10 of 17.5 ms for what streams get in 5: aside half of that is the prompt's."""
    (mixed_s, _, _), (aside_s, gaps, run) = (read(sizes, streams) for sizes in (None, SIZES))
    assert aside_s < 0.9 * mixed_s
    assert max(gaps) < 1.2 * 3.5 * DECODE_S
    run.scheduler.audit()


def test_where_it_is_no_cheaper_it_is_tried_once() -> None:
    """Positions are measured apart: each time a prompt comes twice as far, a chunk is."""
    (mixed_s, _, _), (aside_s, _, _) = (read(sizes, 8, dense_s) for sizes in (None, SIZES))
    assert aside_s < 1.15 * mixed_s


def test_streams_that_end_leave_the_chunk_to_end_at_once() -> None:
    run = Run(Pace(3.5, 64), mixture_s, aside=SIZES).started(2)
    run.add("long", ids(4000, 50), 4)
    while not run.scheduler._aside.has_begun:
        run.step()
    for number in range(2):
        run.scheduler.abort(f"stream {number}")
    rows = run.step()
    assert [row.num_tokens for row in rows] == [512]
    assert not run.scheduler._aside.has_begun
    while len(run.tokens_s["long"]) < 4:
        run.step()


def test_a_short_prompt_is_read_beside_the_parts() -> None:
    """It is in steps with streams, of as many tokens as steps between parts may have."""
    run = Run(Pace(3.5, 64), mixture_s, aside=SIZES).started(4)
    run.add("long", ids(4000, 50), 4)
    while not run.scheduler._aside.has_begun:
        run.step()
    run.add("short", ids(100, 60), 4)
    sizes = []
    while not run.tokens_s["short"]:
        sizes.append(sum(row.num_tokens for row in run.step()))
    assert not run.tokens_s["long"]
    assert max(sizes) == SIZES.beside
    assert len(sizes) < 8


def test_without_streams_nothing_is_read_aside() -> None:
    run = Run(Pace(3.5, 64), mixture_s, aside=SIZES)
    run.add("long", ids(4000, 50), 4)
    while not run.tokens_s["long"]:
        assert run.scheduler._aside.sequence is None
        run.step()
