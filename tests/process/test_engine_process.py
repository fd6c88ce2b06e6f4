"""The engine in a process of its own, and every way in which it can die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

import scripted_process
from number_text import NumberText, spelled
from realizar.config import EngineConfig
from realizar.engine.async_engine import AsyncEngine
from realizar.engine.process_child import Vigilance
from realizar.engine.process_messages import Load
from realizar.engine.supervisor import ProcessLink
from realizar.errors import (
    CapacityError,
    ContextLengthError,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
)
from realizar.sampling_params import SamplingParams, StructuredOutput
from scripted_backend import expected_tokens

pytestmark = pytest.mark.timeout(60)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=200)
QUICK = Vigilance(ping_interval_s=0.05, max_missed_pings=10, step_limit_s=0.5, first_delay_s=0.05, max_crashes=3)


def run(main: Coroutine[Any, Any, None], factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Run on the loop that servers run on, unless told otherwise."""
    with asyncio.Runner(loop_factory=factory or uvloop.new_event_loop) as runner:
        runner.run(main)


def make_engine(vigilance: Vigilance = QUICK, **options: Any) -> AsyncEngine:
    command = (sys.executable, scripted_process.__file__, json.dumps(options))
    return AsyncEngine(ProcessLink(Load("unread", EngineConfig()), vigilance, command), NumberText)


@asynccontextmanager
async def running(vigilance: Vigilance = QUICK, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(vigilance, **options)
    await engine.start()
    try:
        async with asyncio.timeout(20):
            await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


async def settled(engine: AsyncEngine) -> None:
    """Wait, at most a second, until nothing is open in the engine; then its books are in order."""
    async with asyncio.timeout(1):
        while (stats := await engine.stats()).num_running or stats.num_waiting:
            pass
    assert await engine.audit() is None


async def answers(engine: AsyncEngine) -> None:
    """The engine gives the right tokens."""
    output = await (await engine.generate([1, 2], GREEDY)).result()
    assert output.outputs[0].text == spelled(expected_tokens([1, 2], (None,), GREEDY, 8))


async def ready_again(engine: AsyncEngine) -> None:
    async with asyncio.timeout(20):
        await engine.wait_ready()
    await answers(engine)
    await settled(engine)


async def read(engine: AsyncEngine, number: int) -> None:
    async with await engine.generate([number], LONG) as stream:
        async for _ in stream:
            pass


def spawned(path: Path) -> list[tuple[int, float]]:
    """Process ids and start times of the engines so far."""
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return [(int(pid), float(started_s)) for pid, started_s in map(str.split, lines)]


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int, timeout_s: float = 5.0) -> bool:
    until_s = time.monotonic() + timeout_s
    while alive(pid) and time.monotonic() < until_s:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_streams_through_a_process(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        async with running() as engine:
            pid = engine.info.pid
            assert pid != os.getpid()
            async with await engine.generate([1, 2], GREEDY) as stream:
                pieces = [piece async for piece in stream]
                output = await stream.result()
            wanted = expected_tokens([1, 2], (None,), GREEDY, 8)
            assert "".join(piece.text for piece in pieces) == output.outputs[0].text == spelled(wanted)
            assert output.timings.arrival_s <= output.timings.scheduled_s <= output.timings.first_token_s
            with pytest.raises(ContextLengthError):
                await engine.generate([1] * 300, GREEDY)
            await settled(engine)
        assert wait_gone(pid, 1)

    run(main(), factory)


def test_a_grammar_that_crashes_costs_its_request_alone() -> None:
    """The engine's process and its other streams never hear of it."""
    hostile = (
        StructuredOutput("json_schema", '{"const": -9223372036854775808}'),
        StructuredOutput("json_schema", '{"properties": {"a": {"enum": [-9223372036854775808]}}, "required": ["a"]}'),
        StructuredOutput("lark", 'start: "a" %json {"const": -9223372036854775808}'),
        StructuredOutput("json_schema", '{"format": "email", "pattern": "a", "allOf": 5}'),
        StructuredOutput("json_schema", '{"maximum": 1.5, "minimum": 1' + "0" * 400 + "}"),
    )

    async def main() -> None:
        async with running() as engine:
            pid = engine.info.pid
            async with await engine.generate([1, 2], GREEDY) as stream:
                for structured in hostile * 2:
                    with pytest.raises(InvalidRequestError, match="can't be honoured"):
                        await engine.generate([1], SamplingParams(structured=structured))
                good = SamplingParams(structured=StructuredOutput("choice", '["ab"]'), stop_token_ids=(94,))
                output = await (await engine.generate([1], good)).result()
                assert output.outputs[0].token_ids[:2] == (65, 66)
                whole = await stream.result()
            assert whole.outputs[0].text == spelled(expected_tokens([1, 2], (None,), GREEDY, 8))
            await settled(engine)
            assert (engine.info.pid, engine.num_restarts) == (pid, 0)

    run(main())


def test_a_killed_engine_reaches_every_waiter_and_comes_back() -> None:
    async def main() -> None:
        async with running(step_s=0.02) as engine:
            readers = [asyncio.create_task(read(engine, number)) for number in range(12)]  # 8 run, 4 wait
            while (await engine.stats()).num_running < 8:
                pass
            first_pid = engine.info.pid
            killed_s = time.monotonic()
            os.kill(first_pid, signal.SIGKILL)
            ends = await asyncio.gather(*readers, return_exceptions=True)
            assert time.monotonic() - killed_s < 1
            assert {type(end) for end in ends} == {EngineDeadError}
            assert "SIGKILL" in str(ends[0])
            assert engine.state == "starting"
            with pytest.raises(EngineUnavailableError):
                await engine.generate([1], GREEDY)
            before = await engine.stats()
            await ready_again(engine)
            assert engine.info.pid != first_pid
            assert engine.num_restarts == 1
            after = await engine.stats()
            assert after.generation_tokens >= before.generation_tokens + 8
            assert (before.num_restarts, after.num_restarts) == (1, 1)

    run(main())


@pytest.mark.parametrize(
    ("dies", "message"),
    [("step", "fell off the bus"), ("frame", "malformed frame"), ("hangs", "step of the engine has run")],
)
def test_a_failing_engine_is_replaced(tmp_path: Path, dies: str, message: str) -> None:
    async def main() -> None:
        async with running(dies=dies, mends=True, spawns=str(tmp_path / "spawns")) as engine:
            pid = engine.info.pid
            with pytest.raises(EngineDeadError, match=message):
                await read(engine, 1)
            await ready_again(engine)
            assert wait_gone(pid, 0)

    run(main())


def test_a_frozen_engine_is_replaced() -> None:
    async def main() -> None:
        async with running(step_s=0.02) as engine:
            reader = asyncio.create_task(read(engine, 1))
            while not (await engine.stats()).num_running:
                pass
            pid = engine.info.pid
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="has not answered"):
                await asyncio.wait_for(reader, 5)
            await ready_again(engine)
            assert wait_gone(pid, 0)

    run(main())


def test_repeated_crashes_are_given_up_on_after_longer_and_longer_waits(tmp_path: Path) -> None:
    vigilance = Vigilance(first_delay_s=0.4, max_crashes=3)

    async def main() -> None:
        engine = make_engine(vigilance, dies="loading", spawns=str(tmp_path / "spawns"))
        await engine.start()
        with pytest.raises(EngineDeadError, match=r"died 3 times in a row.*status 3"):
            await asyncio.wait_for(engine.wait_ready(), 30)
        first, second, third = (started_s for _, started_s in spawned(tmp_path / "spawns"))
        assert second - first >= 0.4
        assert third - second >= 0.8
        with pytest.raises(EngineDeadError, match="3 times"):
            await engine.generate([1], GREEDY)
        await engine.close()

    run(main())


def test_an_engine_that_never_says_a_word_is_replaced(tmp_path: Path) -> None:
    vigilance = Vigilance(ping_interval_s=0.05, start_limit_s=3.0, first_delay_s=0.05)
    options = {"dies": "silent", "mends": True, "spawns": str(tmp_path / "spawns")}

    async def main() -> None:
        async with running(vigilance, **options) as engine:
            await answers(engine)
            assert engine.num_restarts == 1
            assert wait_gone(spawned(tmp_path / "spawns")[0][0], 0)

    run(main())


def test_a_model_that_can_not_load_is_tried_once(tmp_path: Path) -> None:
    async def main() -> None:
        engine = make_engine(dies="refuses", spawns=str(tmp_path / "spawns"))
        await engine.start()
        with pytest.raises(CapacityError, match="the weights do not fit"):
            await asyncio.wait_for(engine.wait_ready(), 20)
        assert len(spawned(tmp_path / "spawns")) == 1
        await engine.close()

    run(main())


def test_what_the_engine_prints_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        engine = make_engine(dies="loading")
        await engine.start()
        await engine.wait_dead()
        await engine.close()

    run(main())
    assert "engine: about to die" in caplog.text


def test_closing_while_it_starts_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> None:
        for delay_s in (0.0, 0.01, 0.3):
            engine = make_engine(spawns=str(tmp_path / "spawns"))
            await engine.start()
            await asyncio.sleep(delay_s)
            await engine.close()
            assert engine.state == "dead"

    run(main())
    assert all(wait_gone(pid, 1) for pid, _ in spawned(tmp_path / "spawns"))


def test_closing_in_a_step_that_hangs_kills() -> None:
    async def main() -> None:
        vigilance = Vigilance(shutdown_s=0.2)
        async with running(vigilance, dies="hangs") as engine:
            reader = asyncio.create_task(read(engine, 1))
            with suppress(TimeoutError):  # an engine that hangs already tells nothing new
                async with asyncio.timeout(2):
                    while (await engine.stats()).num_steps < 10 and not reader.done():
                        pass
            started_s = time.monotonic()
            await engine.stats()
            assert time.monotonic() - started_s < 3  # what is known, where the engine does not answer
            pid = engine.info.pid
            started_s = time.monotonic()
            await engine.close()
            assert time.monotonic() - started_s < 3
            assert wait_gone(pid, 0)
            with pytest.raises(EngineDeadError):
                await reader

    run(main())


_PARENT = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[1] + "/process")
from test_engine_process import make_engine, read

async def main():
    engine = make_engine(step_s=0.02, dies=sys.argv[2])
    await engine.start()
    info = await engine.wait_ready()
    reading = asyncio.create_task(read(engine, 1))
    await asyncio.sleep(0.5)
    print(info.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("dies", ["", "hangs"])
def test_no_engine_outlives_its_parent(dies: str) -> None:
    async def main() -> None:
        folder = str(Path(scripted_process.__file__).parent)
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PARENT, folder, dies, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
        assert alive(pid)
        parent.kill()
        await parent.wait()
        assert wait_gone(pid, 2)

    run(main())


def test_signals_to_the_group_are_the_parents_business() -> None:
    async def main() -> None:
        async with running(step_s=0.01) as engine:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(engine.info.pid, number)
            await answers(engine)
            assert engine.num_restarts == 0

    run(main())
