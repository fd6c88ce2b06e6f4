"""Sleep and waking through `AsyncEngine`, with a scripted engine on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.sleeping_backend import SleepingBackend
from number_text import NumberText
from realizar.config import EngineConfig
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import ThreadLink
from realizar.errors import (
    CapacityError,
    EngineDeadError,
    EngineUnavailableError,
    RealizarError,
    UnsupportedModelError,
)
from realizar.sampling_params import SamplingParams
from resolving import new_core
from scripted_backend import ScriptedBackend, make_spec
from waits import HANG_S

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@asynccontextmanager
async def running(backend: ScriptedBackend) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(max_step_tokens=1000)
    engine = AsyncEngine(ThreadLink(lambda _: new_core(backend, make_spec(backend.windows), config)), NumberText)
    await engine.start()
    try:
        await asyncio.wait_for(engine.wait_ready(), HANG_S)
        yield engine
    finally:
        await engine.close()


async def text_of(engine: AsyncEngine) -> str:
    async with await engine.generate([1, 2], GREEDY) as stream:
        return (await stream.result()).outputs[0].text


def test_an_engine_sleeps_and_wakes_and_says_why_it_can_not() -> None:
    async def main() -> None:
        backend = SleepingBackend()
        async with running(backend) as engine:
            wanted = await text_of(engine)
            backend.refusal = CapacityError("the host is full")
            with pytest.raises(CapacityError, match="the host is full"):
                await engine.sleep()
            assert await text_of(engine) == wanted
            assert (await engine.sleep()).num_bytes == 1000
            with pytest.raises(EngineUnavailableError, match="the model is asleep"):
                await text_of(engine)
            assert await engine.audit() is None
            assert (await engine.stats()).generation_tokens == 16
            backend.refusal = CapacityError("the GPU is full")
            with pytest.raises(CapacityError, match="the GPU is full"):
                await engine.wake()
            assert (await engine.wake()).seconds == 0.5
            assert await text_of(engine) == wanted
            assert await engine.audit() is None
        with pytest.raises(EngineDeadError):
            await engine.sleep()

    asyncio.run(main())


def test_an_engine_that_can_not_sleep_and_one_that_ends_meanwhile() -> None:
    async def main() -> None:
        async with running(ScriptedBackend()) as engine:
            with pytest.raises(UnsupportedModelError, match="can't sleep"):
                await engine.sleep()
            asked = asyncio.create_task(engine.wake())
            await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(RealizarError):
                await asked

    asyncio.run(main())
