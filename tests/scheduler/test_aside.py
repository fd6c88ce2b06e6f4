"""A prompt that is read aside, on a device whose times are made up: what it gains, and what it costs streams."""

from __future__ import annotations

import itertools

import pytest

from realizar.batch import ScheduledBatch
from realizar.scheduler.pace import Pace
from scheduler.timed_runs import Run, ids
from step_inputs import ScheduledRow

TOKENS = 800
DECODE_S, TOKEN_S = 5e-3, 5e-5


class AsideRun(Run):
    """Chunks take 1.15 times what they take alone, and steps beside them `slowdown` times."""

    def __init__(self, aside_tokens: int, slowdown: float = 3.0) -> None:
        super().__init__(Pace(3.5, 64), self._seconds_of, aside_tokens=aside_tokens)
        self._slowdown, self.ends_s = slowdown, list[float]()

    def step(self) -> tuple[ScheduledRow, ...]:
        self.scheduler.aside.num_running = sum(end > self.now_s for end in self.ends_s)
        return super().step()

    def _seconds_of(self, batch: ScheduledBatch) -> float:
        """The seconds of a step of a mixture: a few tokens of a prompt read all experts, which decodes alone do not."""
        prompts = batch.num_tokens - batch.num_decode_tokens
        seconds = 2 * DECODE_S + TOKEN_S * prompts if prompts else DECODE_S
        if (aside := batch.aside) is None:
            return seconds
        if aside.chunk is not None:
            begin_s = max([self.now_s, *self.ends_s[-1:]])
            self.ends_s.append(begin_s + 1.15 * TOKEN_S * len(aside.chunk.token_ids))
        return self.ends_s[-1] - self.now_s + seconds if aside.is_awaited else self._slowdown * seconds

    def read(self, streams: int) -> tuple[float, list[float]]:
        """Seconds until a prompt of 4,000 tokens has its first token, and a stream's gaps meanwhile."""
        self.started(streams)
        self.add("long", ids(4000, 50), 4)
        came_s = self.now_s
        while not self.tokens_s["long"]:
            self.step()
        times = [each for each in self.tokens_s["stream 0"] if each >= came_s - DECODE_S]
        return self.tokens_s["long"][0] - came_s, [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("streams", [1, 8, 30])
def test_a_long_prompt_is_read_sooner(streams: int) -> None:
    (mixed_s, _), (aside_s, gaps) = AsideRun(0).read(streams), (run := AsideRun(TOKENS)).read(streams)
    assert aside_s < 0.75 * mixed_s
    assert max(gaps) < 1.2 * 3.5 * DECODE_S
    assert len(run.ends_s) > 3
    run.scheduler.audit()


def test_where_streams_lose_their_pace_no_more_chunks_begin() -> None:
    run = AsideRun(TOKENS, slowdown=6.0)
    run.read(8)
    assert len(run.ends_s) <= 2
    run.add("another", ids(4000, 51), 4)
    while not run.tokens_s["another"]:
        run.step()
    assert len(run.ends_s) <= 2


def test_without_streams_a_prompt_goes_on_in_steps_that_wait() -> None:
    run = AsideRun(TOKENS).started(2)
    run.add("long", ids(4000, 50), 4)
    while not run.ends_s:
        run.step()
    for number in range(2):
        run.scheduler.abort(f"stream {number}")
    run.scheduler.aside.num_running = 1
    batch = run.scheduler.schedule()
    assert batch.aside is not None
    assert batch.aside.is_awaited
    assert batch.aside.chunk is None
    assert batch.columns.num_tokens.tolist() == [512]


def test_a_short_prompt_is_read_before_the_long_one_goes_on() -> None:
    run = AsideRun(TOKENS).started(4)
    run.add("long", ids(4000, 50), 4)
    while not run.ends_s:
        run.step()
    run.add("short", ids(400, 60), 4)
    while not run.tokens_s["short"]:
        run.step()
    assert len(run.ends_s) <= 2
    while len(run.tokens_s["long"]) < 4:
        run.step()
    assert len(run.ends_s) > 3


def test_without_streams_nothing_is_read_aside() -> None:
    run = AsideRun(TOKENS)
    run.add("long", ids(4000, 50), 4)
    while not run.tokens_s["long"]:
        run.step()
    assert not run.ends_s
