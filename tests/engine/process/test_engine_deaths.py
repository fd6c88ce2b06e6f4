"""The death of an engine fails its requests; the server goes on with another engine."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.process import scripted_process
from number_text import NumberText, spelled
from realizar.checkpoint.model_files import ModelFiles
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.process.child import LivenessPolicy
from realizar.engine.process.messages import Load
from realizar.engine.process.supervisor import ProcessLink
from realizar.errors import EngineDeadError, EngineUnavailableError, InvalidRequestError
from realizar.sampling_params import SamplingParams
from scripted_backend import expected_tokens
from tiny_model import write_tiny_model
from waits import HANG_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
LONG = SamplingParams(temperature=0.0, max_tokens=200)
QUICK = LivenessPolicy(ping_interval_s=0.05, max_missed_pings=1200, first_delay_s=0.01, max_crashes=2, file_poll_s=0.02)
POISON = [1, 77]


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@asynccontextmanager
async def running(
    liveness: LivenessPolicy = QUICK, files: ModelFiles | None = None, level: str = "WARNING", **options: Any
) -> AsyncIterator[AsyncEngine]:
    import json

    command = (sys.executable, scripted_process.__file__, json.dumps(options))
    engine = AsyncEngine(
        ProcessLink(Load("unread", EngineConfig(), log_level=level), liveness, command, files), NumberText
    )
    await engine.start()
    try:
        async with asyncio.timeout(HANG_S):
            await engine.wait_ready()
        yield engine
    finally:
        await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def kills(engine: AsyncEngine, restarts: int) -> None:
    """The poison is open, the engine dies, and another one comes."""
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        await (await engine.generate(POISON, GREEDY)).result()
    async with asyncio.timeout(HANG_S):
        await engine.wait_ready()
    assert engine.num_restarts == restarts


async def answers(engine: AsyncEngine, prompt: list[int]) -> None:
    output = await (await engine.generate(prompt, GREEDY)).result()
    assert output.outputs[0].text == spelled(expected_tokens(prompt, (None,), GREEDY, 8))


def test_a_request_that_ends_one_engine_after_another_is_refused() -> None:
    """Twice alone; it ends no server, whose limit is two crashes; others are served before and after."""

    async def main() -> None:
        async with running(dies="poison") as engine:
            await kills(engine, 1)
            await answers(engine, [1, 2])
            await kills(engine, 2)
            for sampling in (GREEDY, SamplingParams(temperature=0.0, max_tokens=8, seed=5)):
                with pytest.raises(InvalidRequestError, match="engine stopped each time"):
                    await engine.generate(POISON, sampling)
            await answers(engine, [1, 2])
            assert engine.state == "ready"

    run(main())


def test_requests_beside_it_are_served_in_the_end(tmp_path: Path) -> None:
    """All that were open come again after each death: they share two deaths with the poison, and not the third."""

    slow = tmp_path / "slow"
    slow.touch()

    async def main() -> None:
        async with running(dies="poison", slow=str(slow)) as engine:
            beside = [[number, 3] for number in range(3)]
            for death in (1, 2):
                streams = [await engine.generate(prompt, LONG) for prompt in beside]
                await kills(engine, death)
                for stream in streams:
                    with pytest.raises(EngineDeadError):
                        await stream.result()
            slow.unlink()
            first = await engine.generate(beside[0], LONG)
            poison = asyncio.ensure_future(kills(engine, 3))  # waits until the first has ended
            assert (await first.result()).outputs[0].finish_reason == "length"
            await poison
            with pytest.raises(InvalidRequestError):
                await engine.generate(POISON, GREEDY)
            for prompt in beside:
                assert (await (await engine.generate(prompt, LONG)).result()).outputs[0].finish_reason == "length"

    run(main())


def test_a_client_that_disconnects_before_the_death_is_suspected_too(tmp_path: Path) -> None:
    """The client leaves while the step that kills is on its way; it ends no server, and is refused in the end."""
    held = tmp_path / "held"

    async def main() -> None:
        async with running(dies="poison", holds=str(held), rows=1) as engine:
            for death in (1, 2):
                stream = await engine.generate(POISON, GREEDY)
                await until(held.exists)
                stream.close()
                assert engine.num_open == 0
                held.unlink()
                await until(lambda count=death: engine.num_restarts == count)  # type: ignore[misc]
                async with asyncio.timeout(HANG_S):
                    await engine.wait_ready()
            with pytest.raises(InvalidRequestError, match="engine stopped each time"):
                await engine.generate(POISON, GREEDY)
            assert engine.state == "ready"

    run(main())


def test_deaths_while_nothing_is_open_end_the_server() -> None:
    async def main() -> None:
        async with running() as engine:
            for _ in range(2):
                async with asyncio.timeout(HANG_S):
                    await engine.wait_ready()
                os.kill(engine.info.pid, signal.SIGKILL)
                await until(lambda: engine.state != "ready")
            with pytest.raises(EngineDeadError, match="died 2 times in a row"):
                async with asyncio.timeout(HANG_S):
                    await engine.wait_ready()

    run(main())


def test_an_engine_without_graphs_follows_one_that_captures_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(dies="capture") as engine:
            await answers(engine, [1, 2, 3])
            assert engine.num_restarts == 0

    run(main())
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the GPU's context is lost; another engine is started without graphs"
    ]


def test_an_engine_follows_one_that_lost_a_device_in_its_load(tmp_path: Path) -> None:
    """Also the first one, whose report would end the server if it were of the model."""

    async def main() -> None:
        async with running(dies="lost", mends=True, spawns=str(tmp_path / "spawns")) as engine:
            await answers(engine, [1, 2, 3])

    run(main())
    assert len((tmp_path / "spawns").read_text(encoding="ascii").splitlines()) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the state of a process is read from /proc")
def test_a_stopped_engine_differs_from_a_slow_one() -> None:
    """Long before the questions that a slow one may leave open are used up."""

    async def main() -> None:
        async with running(
            LivenessPolicy(ping_interval_s=0.05, max_missed_pings=1_000_000, max_stopped_pings=3)
        ) as engine:
            stream = await engine.generate([1, 2], LONG)
            os.kill(engine.info.pid, signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="process was stopped"):
                async with asyncio.timeout(HANG_S):
                    await stream.result()
            await engine.wait_ready()
            await answers(engine, [1, 2])

    run(main())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.mark.parametrize("seen", [True, False], ids=["the header shows it", "loading shows it"])
def test_the_api_outlives_its_models_file(model: Path, seen: bool) -> None:
    """No engine starts while the file is broken, and the reason is reported. With the file whole, one runs again.

    A file that is broken beyond its header is known by the message of the engine that loads it.
    """
    files, good = ModelFiles(open_checkpoint(model)), model.read_bytes()
    if not seen:
        files.fault = lambda: None  # type: ignore[method-assign]

    async def main() -> None:
        async with running(files=files, dies="poison", model=str(model)) as engine:
            _ = model.unlink() if seen else model.write_bytes(good[:2000])  # noqa: ASYNC240
            os.kill(engine.info.pid, signal.SIGKILL)
            await until(lambda: engine.fault is not None)
            assert str(engine.fault).startswith("tiny.gguf is gone" if seen else "tiny.gguf: key 'tokenizer")
            assert engine.state == "starting"
            with pytest.raises(EngineUnavailableError, match=r"can't be loaded now: tiny\.gguf") as refused:
                await engine.generate([1, 2], GREEDY)
            assert refused.value.retry_after_s > 1
            if not seen:
                await until(lambda: engine.num_restarts > 3)  # above the limit of crashes
            model.write_bytes(good)  # noqa: ASYNC240
            async with asyncio.timeout(HANG_S):
                await engine.wait_ready()
            assert engine.fault is None
            await answers(engine, [1, 2])

    run(main())


def test_a_death_of_the_file_is_no_requests_fault(model: Path) -> None:
    """The death stands for a page of the mapped file that is gone: SIGBUS in whatever step reads it."""
    files, good = ModelFiles(open_checkpoint(model)), model.read_bytes()

    async def main() -> None:
        async with running(files=files, slow=str(model)) as engine:
            stream = await engine.generate([1, 2], LONG)
            model.write_bytes(good)  # noqa: ASYNC240 - whole, and touched while the engine ran
            os.kill(engine.info.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await stream.result()
            assert len(engine._requests.suspects) == 0
            async with asyncio.timeout(HANG_S):
                await engine.wait_ready()
            stream = await engine.generate([1, 2], LONG)
            os.kill(engine.info.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await stream.result()
            assert len(engine._requests.suspects) == 1

    run(main())


@pytest.mark.parametrize(("level", "heard"), [("DEBUG", True), ("INFO", False)])
def test_the_engine_logs_at_the_servers_level(level: str, heard: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(level=level):
            pass

    with caplog.at_level(logging.DEBUG):
        run(main())
    found = [record.levelname for record in caplog.records if "realizar.scripted: loaded" in record.getMessage()]
    assert found == (["DEBUG"] if heard else [])


def test_an_engines_lines_keep_their_levels(caplog: pytest.LogCaptureFixture) -> None:
    """Lines that a library prints are warnings."""
    from realizar.engine.process.child import _log_line

    with caplog.at_level(logging.DEBUG):
        _log_line("engine", b"INFO realizar.backends: loaded")
        _log_line("engine", b"ERROR realizar.engine.core.engine_core: a step failed")
        _log_line("engine", b"a library's words")
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [
        ("INFO", "engine: realizar.backends: loaded"),
        ("ERROR", "engine: realizar.engine.core.engine_core: a step failed"),
        ("WARNING", "engine: a library's words"),
    ]
