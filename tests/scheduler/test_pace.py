"""`Pace` bounds the prompt tokens that are read beside running streams; the machines' step times are made up."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from realizar.batch import AsideWork
from realizar.scheduler.pace import Pace

TILE_TOKENS = 12


@dataclass(frozen=True)
class Machine:
    """Seconds of a step: a share for itself, per stream, per tile of tokens, and per prompt token and position."""

    step_s: float
    stream_s: float
    tile_s: float
    position_s: float
    noise: float = 0.0
    token_s: float = 0.0

    def step(self, streams: int, prompt_tokens: int, position: int, rng: random.Random) -> float:
        tiles = -(-(streams + prompt_tokens) // TILE_TOKENS)
        seconds = self.step_s + self.stream_s * streams + self.tile_s * tiles
        seconds += prompt_tokens * (self.token_s + position * self.position_s)
        return seconds * (1.0 + self.noise * rng.random())


SMALL_MODEL = Machine(1e-3, 1e-4, 1.5e-3, 2e-8)
LARGE_MODEL = Machine(40e-3, 1e-3, 20e-3, 1e-7)
DEVICE = Machine(8e-3, 1e-5, 1.2e-4, 1e-10)
SMOLLM2 = Machine(2.8e-3, 5.5e-4, 0.0, 7e-7, token_s=5.5e-4)  # one thread, by realizar profile
NOISY = Machine(1e-3, 1e-4, 1.5e-3, 2e-8, noise=0.3)


def read(pace: Pace, machine: Machine, streams: Callable[[int], int], prompt: int, budget: int) -> list[float]:
    """Read a prompt beside as many streams as `streams` says at each step; the steps' times."""
    rng = random.Random(1)
    done, times = 0, []
    while done < prompt:
        count = streams(len(times))
        most = pace.prompt_tokens(count, done)
        tokens = min(prompt - done, budget - count, budget if most is None else most)
        seconds = machine.step(count, tokens, done, rng)
        pace.observe(count, tokens, seconds, done)
        times.append(seconds)
        done += tokens
        assert len(times) < 4 * prompt
    return times


def started(machine: Machine, streams: int, decodes: int) -> Pace:
    """A pace that has seen the streams' own prompts, and some of their steps."""
    pace, rng = Pace(2.5, TILE_TOKENS), random.Random(2)
    for _ in range(streams):
        pace.observe(0, 64, machine.step(0, 64, 0, rng))
    for _ in range(decodes):
        pace.observe(streams, 0, machine.step(streams, 0, 0, rng))
    return pace


@pytest.mark.parametrize("machine", [SMALL_MODEL, LARGE_MODEL, DEVICE, SMOLLM2, NOISY])
@pytest.mark.parametrize("streams", [1, 5, 12, 40])
@pytest.mark.parametrize("decodes", [0, 20])
def test_no_step_is_much_longer_than_a_decode(machine: Machine, streams: int, decodes: int) -> None:
    """This holds also if the long prompt comes before any step of decodes alone was seen."""
    times = read(started(machine, streams, decodes), machine, lambda _: streams, 4000, 512)
    alone = machine.step(streams, 0, 0, random.Random(3))
    assert max(times) < 4.0 * max(statistics.median(times), alone)
    assert max(times) < 4.0 * alone


@pytest.mark.parametrize("machine", [SMALL_MODEL, LARGE_MODEL, DEVICE])
def test_the_time_that_there_is_gets_used(machine: Machine) -> None:
    """Once learned, steps come near what they may take, but for what a tile is too coarse for."""
    times = read(started(machine, 4, 10), machine, lambda _: 4, 8000, 512)
    alone = machine.step(4, 0, 0, random.Random(3))
    assert statistics.median(times[len(times) // 2 :]) > 1.4 * alone


def test_streams_that_leave_make_room_smaller() -> None:
    """40 streams shrink to one, whose steps are four times shorter; `Pace` takes their time from measurements."""
    pace = started(SMALL_MODEL, 40, 10)
    times = read(pace, SMALL_MODEL, lambda step: 40 if step < 30 else 1, 6000, 512)
    alone = SMALL_MODEL.step(1, 0, 0, random.Random(3))
    assert max(times[30:]) < 4.0 * alone


def test_a_fast_device_reads_more_than_keeps_the_decodes_pace() -> None:
    """Decodes of half a millisecond would leave room for 75 tokens; 8 ms leave it for some 700."""
    counts = []
    for least_s in (0.0, 8e-3):
        pace = Pace(2.5, 64, least_s)
        for _ in range(40):
            pace.observe(5, 0, 0.5e-3)
            read = pace.prompt_tokens(5) or 64
            pace.observe(5, read, 0.5e-3 + 1e-5 * read)
        counts.append(pace.prompt_tokens(5))
    assert counts == [pytest.approx(75, rel=0.1), pytest.approx(750, rel=0.1)]


def test_there_is_no_limit_before_anything_is_known() -> None:
    assert Pace(2.5, TILE_TOKENS).prompt_tokens(0) is None
    assert Pace(2.5, TILE_TOKENS).prompt_tokens(7) is None


@pytest.mark.parametrize(("token_s", "tokens"), [(1e-3, 2048), (2e-5, 2048), (1.4e-5, 3571), (5e-6, 10_000)])
def test_a_step_without_streams_ends_soon(token_s: float, tokens: int) -> None:
    """A request that comes waits for the steps in flight: 50 ms each, or 2,048 tokens where a device is slower.

    A step of a few more, which a host starts kernel by kernel, is not worth it.
    """
    pace = Pace(2.5, TILE_TOKENS)
    for _ in range(9):
        pace.observe(0, 1024, 1024 * token_s)
    assert pace.prompt_tokens(0) == pytest.approx(tokens, abs=1)


@pytest.mark.parametrize("streams", range(1, 30))
def test_a_prompt_always_goes_on(streams: int) -> None:
    """It goes on even if a prompt token costs more than all decodes, or no times are reported any more."""
    pace = Pace(2.5, TILE_TOKENS)
    pace.observe(0, 10, 5.0)
    pace.observe(streams, 0, 0.001)
    assert pace.prompt_tokens(streams) == 2
    unseen = Pace(2.5, TILE_TOKENS)
    unseen.observe(0, 10, 5.0)
    asked = [unseen.prompt_tokens(streams) for _ in range(6)]
    assert 0 in asked
    assert asked[-1] == 2


@pytest.mark.parametrize("streams", range(1, 30))
def test_a_tile_that_lacks_little_is_filled(streams: int) -> None:
    """Time for 25 tokens: up to three more where a tile then is full, which costs no more than not."""
    pace = Pace(2.5, TILE_TOKENS)
    pace.observe(0, 1000, 2.0)
    for _ in range(40):
        pace.observe(streams, 0, 0.05)
        tokens = pace.prompt_tokens(streams)
        assert tokens is not None
        pace.observe(streams, tokens, 0.05 + 2.9e-3 * tokens)
    lacking = -(streams + 25) % TILE_TOKENS
    assert pace.prompt_tokens(streams) == 25 + (lacking if lacking <= 3 else 0)


def test_decodes_are_measured_again_after_a_while() -> None:
    """One step in some sixty reads nothing, and what it shows counts: here decodes have become twice as long."""
    pace = started(SMALL_MODEL, 2, 5)
    chunks: list[int] = []
    for _ in range(400):
        tokens = pace.prompt_tokens(2)
        assert tokens is not None
        chunks.append(tokens)
        pace.observe(2, tokens, 5.4e-3 + 2e-4 * tokens)
    assert 4 <= chunks.count(0) <= 8
    assert statistics.median(chunks[-60:]) > statistics.median(chunks[:60])


def chunks_beside(pace: Pace, alone_s: float, token_s: float, position: int, steps: int) -> list[float]:
    """Times of steps beside 4 streams where a prompt token costs so much."""
    times = []
    for _ in range(steps):
        tokens = pace.prompt_tokens(4, position)
        assert tokens is not None
        times.append(alone_s + token_s * tokens)
        pace.observe(4, tokens, times[-1], position)
    return times


def test_a_dearer_prompt_is_felt_soon_and_a_cheaper_one_with_care() -> None:
    """Tokens that cost four times as much, at the same position, and back."""
    pace = started(SMALL_MODEL, 4, 10)
    alone = SMALL_MODEL.step(4, 0, 0, random.Random(3))
    chunks_beside(pace, alone, 1e-4, 0, 60)
    dear = chunks_beside(pace, alone, 4e-4, 0, 60)
    cheap = chunks_beside(pace, alone, 1e-4, 0, 60)
    assert sum(seconds > 3.0 * alone for seconds in dear) <= 4
    assert all(seconds < 3.0 * alone for seconds in (*dear[8:], *cheap))
    assert cheap[-1] > 1.7 * alone


def test_distances_are_learned_apart() -> None:
    """Steps go from a prompt's beginning to far behind a prefix, where a token costs four times as much, and back.

    The first time that it goes far is a guess; from then on no step is too long, and none is too short.
    """
    pace = started(SMALL_MODEL, 4, 10)
    alone = SMALL_MODEL.step(4, 0, 0, random.Random(3))
    chunks_beside(pace, alone, 1e-4, 100, 60)
    far = chunks_beside(pace, alone, 4e-4, 3900, 60)
    assert max(far) < 4.0 * alone
    for token_s, position in ((1e-4, 100), (4e-4, 3900), (1e-4, 130), (4e-4, 2500)):
        times = chunks_beside(pace, alone, token_s, position, 5)
        assert max(times) < 2.6 * alone
        assert all(seconds > 1.7 * alone or seconds == alone for seconds in times)  # one may read nothing


def test_a_machine_that_slows_down_for_good_goes_on_reading() -> None:
    """Eight times slower at once, decodes and prompts alike: within 100 steps a step reads half as much as before."""
    rng, pace = random.Random(4), started(SMOLLM2, 8, 20)
    chunks = []
    for slower in (1.0, 8.0):
        for _ in range(100):
            tokens = pace.prompt_tokens(8, 1000)
            assert tokens is not None
            chunks.append(tokens)
            pace.observe(8, tokens, slower * SMOLLM2.step(8, tokens, 1000, rng), 1000)
    assert statistics.median(chunks[-20:]) >= statistics.median(chunks[:100]) / 2


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_slow_moments_of_the_machine_do_not_set_the_pace(streams: int) -> None:
    """One step in seven takes up to three times what it should: what is asked for would not take longer, nor less."""
    rng, pace, machine = random.Random(5), Pace(2.5, TILE_TOKENS), SMOLLM2
    alone = machine.step(streams, 0, 0, rng)

    def moment() -> float:
        return rng.uniform(1.5, 3.0) if rng.random() < 0.15 else rng.uniform(1.0, 1.3)

    pace.observe(0, 64, machine.step(0, 64, 0, rng) * moment())
    asked, position = [], 0
    for _ in range(30):
        pace.observe(streams, 0, alone * moment())
    while position < 4000:
        tokens = pace.prompt_tokens(streams, position)
        assert tokens is not None
        seconds = machine.step(streams, tokens, position, rng)
        asked.append(seconds)
        pace.observe(streams, tokens, seconds * moment(), position)
        position += tokens
    assert statistics.quantiles(asked, n=50)[-1] < 4.0 * alone  # all but one in fifty
    assert statistics.fmean(asked) > 1.8 * alone


def test_steps_in_flight_are_timed_one_by_one() -> None:
    """The second begins when the first ends, however early it was submitted."""
    pace = Pace(2.5, TILE_TOKENS)
    pace.submitted(0.0)
    pace.submitted(0.001)
    pace.ended(0, 100, 1.0)
    pace.ended(1, 0, 1.010)
    alone = Pace(2.5, TILE_TOKENS)
    alone.observe(0, 100, 1.0)
    alone.observe(1, 0, 0.010)
    assert pace.prompt_tokens(1) == alone.prompt_tokens(1)


def test_other_work_behind_a_step_takes_half_as_long_and_is_not_measured() -> None:
    """All but for a step now and then, by which that is known; where more wait for it, as prompts do."""
    pace = Pace(2.5, TILE_TOKENS)
    assert pace.beside_s(8, is_much=False) == 0.0
    pace.submitted(1.0, 8)
    pace.ended(8, 0, 1.010)
    budgets = [pace.beside_s(9, is_much=False) for _ in range(64)]
    assert budgets.count(0.0) == 4
    assert sorted(set(budgets)) == pytest.approx([0.0, 0.005])
    assert pace.beside_s(8, is_much=True) == pytest.approx(0.015)
    pace.submitted(2.0, 8)
    pace.ended(8, 0, 2.015)
    assert pace.beside_s(8, is_much=False) == pytest.approx(0.005)
    assert pace.beside_s(0, is_much=False) == Pace(math.inf, 1).beside_s(8, is_much=False) == math.inf


@pytest.mark.parametrize(("alone_s", "least_s"), [(3.2e-3, 12e-3), (8e-3, 0.0)])
@pytest.mark.parametrize(("is_much", "is_shared"), [(False, False), (True, False), (True, True)])
def test_prompts_and_other_work_share_the_time_of_a_step(
    alone_s: float, least_s: float, is_much: bool, is_shared: bool
) -> None:
    """Both come without end, and a prompt's steps are no longer with such work behind them than without; neither has
    less than a third of the time beside decodes. Beside streams of others both have half a step.
    """
    pace, token_s = Pace(3.25, 64, least_s), 28e-6
    most_s = 1.5 * alone_s if is_shared else max(3.25 * alone_s, least_s)
    pace.observe(0, 1000, 1000 * token_s)
    pace.observe(32, 0, alone_s)
    now_s, slice_s = 1.0, 0.0
    gaps, read_s, other_s = list[float](), 0.0, 0.0
    for _ in range(2000):
        tokens = pace.prompt_tokens(32, is_much=is_shared)
        assert tokens is not None
        pace.submitted(now_s, 0 if tokens else 32)
        gaps.append(slice_s + alone_s + tokens * token_s)
        now_s += gaps[-1]
        pace.ended(32, tokens, now_s)
        slice_s = pace.beside_s(32, is_much=is_much, reads=tokens > 0, is_shared=is_shared)
        read_s, other_s = read_s + tokens * token_s, other_s + slice_s
    assert max(gaps[500:]) < 1.05 * most_s
    assert min(read_s, other_s) > 0.3 * (most_s - alone_s) * len(gaps)


def test_other_work_waits_for_no_step_of_decodes_alone_while_a_chunk_is_read_aside() -> None:
    pace = Pace(2.5, TILE_TOKENS)
    pace.submitted(1.0, 8)
    pace.ended(8, 0, 1.020, aside=AsideWork(None, is_awaited=False))
    assert pace.beside_s(8, is_much=False) == pytest.approx(0.010)


def test_a_picture_before_a_prompt_leaves_it_measured() -> None:
    """Where nothing else tells what a token of a prompt takes: requests with pictures may all come alone."""
    pace = Pace(2.5, TILE_TOKENS)
    for at_s in (1.0, 2.0):
        assert pace.beside_s(0, is_much=False) == math.inf
        pace.submitted(at_s)
        pace.ended(0, 100, at_s + 0.1)
        assert pace.alone_token_s == pytest.approx(0.001)


def test_beside_a_chunk_steps_are_nearly_as_far_apart_as_those_with_prompts() -> None:
    pace = Pace(3.0, TILE_TOKENS)
    pace.submitted(1.0, 8)
    assert pace.pause_s(1.0) == 0.0  # how long one takes is not known
    pace.observe(8, 0, 0.010)
    assert 0.030 < pace.pause_s(1.0) < 0.036
    assert pace.pause_s(1.020) == pytest.approx(pace.pause_s(1.0) - 0.020)
    assert pace.pause_s(1.040) == 0.0
    pace.submitted(2.0)  # with prompts
    assert pace.pause_s(2.0) == 0.0


@pytest.mark.parametrize("tile", [12, 64])
def test_a_chunk_fills_a_tile_of_the_device(tile: int) -> None:
    """A chunk leaves either no gap in its last tile or a gap of more than a quarter, for the device's own tile size."""
    pace = Pace(2.5, tile)
    pace.observe(0, 4 * tile, 4e-3)
    seen = set()
    for decodes in range(1, tile):
        pace.observe(decodes, 0, 1e-3)
        pace._last_chunk = 4 * tile
        tokens = pace.prompt_tokens(decodes)
        assert tokens is not None
        lacking = -(decodes + tokens) % tile
        seen.add(lacking)
        assert lacking == 0 or lacking > tile // 4
    assert {0, tile // 4 + 1} <= seen


SIZES = (16, 32, *range(64, 513, 64), 640, 768, 896, 1024, 1280, 1536, 1664, 1792, 1920, 2048)


@pytest.mark.parametrize("token_s", [1e-2, 1e-3, 1e-4, 1e-5])
def test_a_chunk_fills_the_nearest_size_of_the_device(token_s: float) -> None:
    """Where the device pads steps to sizes, a step has no padding."""
    for decodes in range(1, 200, 7):
        given, free = Pace(2.5, 64, 0.012, SIZES), Pace(2.5, 1, 0.012)
        for pace in (given, free):
            pace.observe(0, 2000, 1000 * token_s)
            pace.observe(decodes, 0, 1e-3)
            pace._last_chunk = 100_000
        tokens, fitting = given.prompt_tokens(decodes), free.prompt_tokens(decodes)
        assert tokens is not None
        assert fitting is not None
        assert decodes + tokens in SIZES
        assert abs(tokens - fitting) == min(abs(size - decodes - fitting) for size in SIZES if size >= decodes + 2)
