"""The engine in a process of its own, and every way in which it can die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from engine.process import scripted_process
from number_text import NumberText, spelled
from realizar.config import EngineConfig
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.process.begun import BegunEngine
from realizar.engine.process.child import EngineChild, LivenessPolicy
from realizar.engine.process.messages import Command, Load, Ping
from realizar.engine.process.supervisor import ProcessLink
from realizar.errors import (
    CapacityError,
    ContextLengthError,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
)
from realizar.ipc.frames import FrameReader
from realizar.sampling_params import SamplingParams, StructuredOutput
from scripted_backend import expected_tokens
from waits import HANG_S, is_alive, wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LOAD = Load("unread", EngineConfig())
LONG = SamplingParams(temperature=0.0, max_tokens=200)


def run(main: Coroutine[Any, Any, None], factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Run on the loop that servers use, unless another is given."""
    with asyncio.Runner(loop_factory=factory or uvloop.new_event_loop) as runner:
        runner.run(main)


def patience(**changes: Any) -> Any:
    """Limits that a busy machine keeps; a test may change one once the engine can't keep it any more."""
    return SimpleNamespace(**{**asdict(LivenessPolicy(0.05, max_missed_pings=1200, first_delay_s=0.05)), **changes})


def make_engine(liveness: Any = None, begun: BegunEngine | None = None, **options: Any) -> AsyncEngine:
    link = ProcessLink(LOAD, liveness or patience(), command(**options), begun=begun)
    return AsyncEngine(link, NumberText)


def command(**options: Any) -> tuple[str, ...]:
    return sys.executable, scripted_process.__file__, json.dumps(options)


@asynccontextmanager
async def running(liveness: Any = None, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = make_engine(liveness, **options)
    await engine.start()
    try:
        async with asyncio.timeout(HANG_S):
            await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


async def settled(engine: AsyncEngine) -> None:
    """Wait until nothing is open in the engine, and audit its KV blocks."""
    async with asyncio.timeout(HANG_S):
        while (stats := await engine.stats()).num_running or stats.num_waiting:
            pass
    assert await engine.audit() is None


async def answers(engine: AsyncEngine) -> None:
    """The engine gives the right tokens."""
    output = await (await engine.generate([1, 2], GREEDY)).result()
    assert output.outputs[0].text == spelled(expected_tokens([1, 2], (None,), GREEDY, 8))


async def ready_again(engine: AsyncEngine) -> None:
    async with asyncio.timeout(HANG_S):
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


async def wait_file(path: Path) -> None:
    """Wait until the engine says by this file that it waits."""
    until_s = time.monotonic() + HANG_S
    while not path.exists():  # noqa: ASYNC240 - it does not block
        assert time.monotonic() < until_s, "waited in vain"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_an_engine_that_was_begun_is_the_first_one(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """It loads before anybody looks after it; when it dies another one follows, as after any."""
    begun = BegunEngine(command())
    begun.send(LOAD)

    async def main() -> None:
        async with running(begun=begun) as engine:
            begun.end()
            first = engine.info.pid
            await answers(engine)
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: engine.num_restarts == 1)
            await ready_again(engine)

    run(main(), factory)


def test_a_process_gets_its_first_record_before_all_others(tmp_path: Path) -> None:
    """Also where somebody sends it one while it is being started."""
    program = "import pathlib, socket, sys; came = socket.socket(fileno=int(sys.argv[2])).recv(1 << 16);"
    command = sys.executable, "-c", f"{program} pathlib.Path(sys.argv[1]).write_bytes(came)", str(tmp_path / "came")

    async def main() -> None:
        child = EngineChild(lambda _event: None, patience())
        starting = asyncio.create_task(child.start(command, LOAD))
        while not starting.done():
            child.send(Ping())
            await asyncio.sleep(0)
        await child.wait_end()
        await child.reap()

    run(main())
    (first, *_) = FrameReader[Command](Command).feed((tmp_path / "came").read_bytes())
    assert first == LOAD


def test_an_engine_that_nobody_takes_is_ended() -> None:
    begun = BegunEngine((sys.executable, "-c", "import time; time.sleep(600)"))
    begun.send(LOAD)
    begun.end()
    begun.end()
    process, _ = begun.take()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_streams_through_a_process(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        async with running() as engine:
            pid = engine.info.pid
            assert pid != os.getpid()
            async with await engine.generate([1, 2], GREEDY) as stream:
                deltas = [delta async for delta in stream]
                output = await stream.result()
            wanted = expected_tokens([1, 2], (None,), GREEDY, 8)
            assert "".join(delta.text for delta in deltas) == output.outputs[0].text == spelled(wanted)
            assert output.timings.arrival_s <= output.timings.scheduled_s <= output.timings.first_token_s
            with pytest.raises(ContextLengthError):
                await engine.generate([1] * 300, GREEDY)
            await settled(engine)
        assert not is_alive(pid)

    run(main(), factory)


def test_a_grammar_that_crashes_costs_its_request_alone() -> None:
    """The engine's process and its other streams never hear of it."""
    hostile = (
        StructuredOutput("json_schema", '{"const": -9223372036854775808}'),
        StructuredOutput("json_schema", '{"properties": {"a": {"enum": [-9223372036854775808]}}, "required": ["a"]}'),
        StructuredOutput("lark", 'start: %json {"const": -9223372036854775808}'),
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


def test_a_killed_engine_reaches_every_waiter_and_comes_back(tmp_path: Path) -> None:
    holds, spawns = tmp_path / "holds", tmp_path / "spawns"

    async def main() -> None:
        async with running(holds=str(holds), mends=True, spawns=str(spawns)) as engine:
            readers = [asyncio.create_task(read(engine, number)) for number in range(12)]  # 8 run, 4 wait
            await wait_file(holds)
            first_pid = engine.info.pid
            os.kill(first_pid, signal.SIGKILL)
            ends = await asyncio.gather(*readers, return_exceptions=True)
            assert engine.state == "starting", "they hear of it before there is another engine"
            assert {type(end) for end in ends} == {EngineDeadError}
            assert "SIGKILL" in str(ends[0])
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
    [("step", "fell off the bus"), ("frame", "malformed frame"), ("hangs", "has run one step for")],
)
def test_a_failing_engine_is_replaced(tmp_path: Path, dies: str, message: str) -> None:
    async def main() -> None:
        limits = patience(step_limit_s=0.5 if dies == "hangs" else 900.0)
        async with running(limits, dies=dies, mends=True, spawns=str(tmp_path / "spawns")) as engine:
            pid = engine.info.pid
            with pytest.raises(EngineDeadError, match=message):
                await read(engine, 1)
            limits.step_limit_s = 900.0
            await ready_again(engine)
            assert not is_alive(pid)

    run(main())


def test_a_frozen_engine_is_replaced(tmp_path: Path) -> None:
    holds, spawns = tmp_path / "holds", tmp_path / "spawns"

    async def main() -> None:
        limits = patience()
        async with running(limits, holds=str(holds), rows=1, mends=True, spawns=str(spawns)) as engine:
            reader = asyncio.create_task(read(engine, 1))
            await wait_file(holds)
            pid = engine.info.pid
            limits.max_stopped_pings = 1_000_000  # as where the system does not tell
            os.kill(pid, signal.SIGSTOP)
            limits.max_missed_pings = 5
            with pytest.raises(EngineDeadError, match="answered none of"):
                await asyncio.wait_for(reader, HANG_S)
            limits.max_missed_pings = 1200
            await ready_again(engine)
            assert not is_alive(pid)

    run(main())


def test_repeated_crashes_are_given_up_on_after_longer_and_longer_waits(tmp_path: Path) -> None:
    liveness = LivenessPolicy(first_delay_s=0.4, max_crashes=3)

    async def main() -> None:
        engine = make_engine(liveness, dies="loading", spawns=str(tmp_path / "spawns"))
        await engine.start()
        with pytest.raises(EngineDeadError, match=r"died 3 times in a row.*status 3"):
            await asyncio.wait_for(engine.wait_ready(), HANG_S)
        first, second, third = (started_s for _, started_s in spawned(tmp_path / "spawns"))
        assert second - first >= 0.4
        assert third - second >= 0.8
        with pytest.raises(EngineDeadError, match="3 times"):
            await engine.generate([1], GREEDY)
        await engine.close()

    run(main())


class ShortPatience(SimpleNamespace):
    """Limits whose start only the first engine can miss, once it runs: it never says a word."""

    engine: AsyncEngine
    spawns: Path

    @property
    def start_limit_s(self) -> float:
        return 0.2 if spawned(self.spawns) and self.engine.num_restarts == 0 else 120.0


def test_an_engine_that_never_says_a_word_is_replaced(tmp_path: Path) -> None:
    spawns = tmp_path / "spawns"
    limits = {name: value for name, value in vars(patience()).items() if name != "start_limit_s"}

    async def main() -> None:
        liveness = ShortPatience(**limits, spawns=spawns)
        engine = liveness.engine = make_engine(liveness, dies="silent", mends=True, spawns=str(spawns))
        await engine.start()
        await ready_again(engine)
        assert engine.num_restarts == 1
        assert not is_alive(spawned(spawns)[0][0])
        await engine.close()

    run(main())


def test_a_model_that_can_not_load_is_tried_once(tmp_path: Path) -> None:
    async def main() -> None:
        engine = make_engine(dies="refuses", spawns=str(tmp_path / "spawns"))
        await engine.start()
        with pytest.raises(CapacityError, match="the weights do not fit"):
            await asyncio.wait_for(engine.wait_ready(), HANG_S)
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


@pytest.mark.parametrize("factory", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_closing_while_it_starts_leaves_no_process(
    tmp_path: Path, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Closed after so many turns of the event loop, as the process begins, and as it loads; then the loop ends."""
    spawns, loads = tmp_path / "spawns", tmp_path / "loads"

    async def main(moment: int | Path) -> None:
        engine = make_engine(patience(shutdown_s=0.05), spawns=str(spawns), loads=str(loads))
        await engine.start()
        if isinstance(moment, int):
            for _ in range(moment):
                await asyncio.sleep(0)
        else:
            await wait_file(moment)
        await engine.close()
        assert engine.state == "dead"
        assert not any(is_alive(pid) for pid, _ in spawned(spawns))

    for moment in (*range(8), spawns, loads):
        spawns.unlink(missing_ok=True)
        loads.unlink(missing_ok=True)
        run(main(moment), factory)


def test_closing_in_a_step_that_hangs_kills(tmp_path: Path) -> None:
    """The step never ends, so the known facts are reported without it, and nothing waits for it."""
    holds = tmp_path / "holds"

    async def main() -> None:
        async with running(patience(shutdown_s=0.2), holds=str(holds), rows=1) as engine:
            reader = asyncio.create_task(read(engine, 1))
            await wait_file(holds)
            await engine.stats()
            pid = engine.info.pid
            await engine.close()
            assert not is_alive(pid)
            with pytest.raises(EngineDeadError):
                await reader

    run(main())


_PARENT = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from engine.process.test_engine_process import make_engine, read, wait_file

async def main():
    engine = make_engine(**json.loads(sys.argv[2]))
    await engine.start()
    info = await engine.wait_ready()
    reading = asyncio.create_task(read(engine, 1))
    if "holds" in sys.argv[2]:
        await wait_file(Path(json.loads(sys.argv[2])["holds"]))
    print(info.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_no_engine_outlives_its_parent(tmp_path: Path, hangs: bool) -> None:
    async def main() -> None:
        folder = str(Path(scripted_process.__file__).parents[2])
        options = json.dumps({"holds": str(tmp_path / "holds"), "rows": 1} if hangs else {})
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _PARENT, folder, options, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(parent.stdout.readline(), HANG_S))
        assert is_alive(pid)
        parent.kill()
        await parent.wait()
        wait_until(lambda: not is_alive(pid))

    run(main())


def test_signals_to_the_group_are_the_parents_business() -> None:
    async def main() -> None:
        async with running() as engine:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(engine.info.pid, number)
            await answers(engine)
            assert engine.num_restarts == 0

    run(main())
