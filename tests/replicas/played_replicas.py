"""Replicas whose engines are played by hand, below a client that is real."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from realizar.backends.base import Capacity
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import LinkListener
from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.process.messages import (
    Accepted,
    Add,
    Ask,
    CachedKeys,
    Command,
    EngineInfo,
    EngineLost,
    Outputs,
    Ready,
    Reply,
)
from realizar.engine.stats import EngineStats
from realizar.errors import EngineDeadError, InvalidRequestError
from realizar.ipc.error_records import record_error
from realizar.kv_cache.block_keys import KEY_BYTES, BlockKeys, CacheChanges
from realizar.replicas.link import ReplicaLink
from realizar.request import NO_CLIENT, Client
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import ChoiceEnd, ChoiceStart, StepDeltas
from waits import HANG_S

BLOCK = 4


class Engine:
    """An engine's side of a link: what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Command] = []
        self.is_closed = False
        self.numbers: dict[str, int] = {}

    async def start(self, listener: LinkListener) -> None:
        self.listener = listener

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if isinstance(command, Add):
            if command.request.prompt_token_ids[0] == 98:
                raise InvalidRequestError("too large")
            self.listener.handle(Accepted(command.request.request_id))
        elif isinstance(command, Ask):
            stats = EngineStats(num_running=1, generation_tokens=10)
            values = {"stats": stats, "audit": "a block is lost", "clear_cache": None}
            self.listener.handle(Reply(command.number, values[command.what]))

    async def close(self, *, at_once: bool = False) -> None:
        self.is_closed = True

    def ready(self, max_running: int = 2) -> None:
        capacity = Capacity(BLOCK, (64,), 100, 1, 1000, "none", 0.0)
        info = EngineInfo("made up", 99, 1, 4096, 4096, max_running, capacity, 7, 3, 1, BLOCK)
        self.listener.handle(Ready(info))

    @property
    def added(self) -> list[str]:
        return [command.request.request_id for command in self.sent if isinstance(command, Add)]

    def begin(self, name: str) -> None:
        """Give a request its first token."""
        number = self.numbers[name] = len(self.numbers)
        numbers, tokens = array("q", [number]).tobytes(), array("i", [5]).tobytes()
        self.listener.handle(Outputs(StepDeltas(1.0, numbers, tokens, starts=(ChoiceStart(number, name, 0, 0.5),))))

    def end(self, name: str) -> None:
        self.listener.handle(Outputs(StepDeltas(1.0, ends=(ChoiceEnd(self.numbers[name], "length"),))))

    def die(self, *, restarting: bool = True) -> None:
        self.listener.handle(EngineLost(record_error(EngineDeadError("it was killed")), restarting=restarting))
        self.numbers.clear()

    def hold(self, token_ids: list[int]) -> None:
        """Report the blocks of a prompt as cached."""
        keys = BlockKeys(BLOCK, None).of(np.array(token_ids, np.int32))
        self.listener.handle(CachedKeys(CacheChanges(b"".join(key[:KEY_BYTES] for key in keys))))


class PlainText:
    """A `GrowingText` that says how many tokens came."""

    may_stop = False
    stop_string = None
    marks = ()

    def add(self, token_ids: Any) -> str:
        return "x" * len(token_ids)

    def finish(self) -> str:
        return ""


class Scene:
    """Some replicas, each with the engines that were started in it."""

    def __init__(self, count: int) -> None:
        self.started: list[list[Engine]] = [[] for _ in range(count)]
        self.link = ReplicaLink([lambda place=place: self.new(place) for place in range(count)])  # type: ignore[misc]
        self.client = AsyncEngine(self.link, lambda _: PlainText())

    def new(self, place: int) -> Engine:
        engine = Engine()
        self.started[place].append(engine)
        return engine

    @property
    def engines(self) -> list[Engine]:
        """The last engine of each replica."""
        return [each[-1] for each in self.started]

    async def add(self, name: str, token_ids: list[int], client: Client = NO_CLIENT) -> AsyncStream:
        sampling = SamplingParams(max_tokens=8, seed=1)
        return await self.client.generate(token_ids, sampling, request_id=name, client=client)

    def owner(self, name: str) -> Engine:
        (owner,) = (engine for engine in self.engines if name in engine.added)
        return owner


def play(count: int, main: Callable[[Scene], Coroutine[Any, Any, None]], *, ready: bool = True) -> None:
    async def run() -> None:
        scene = Scene(count)
        await scene.client.start()
        if ready:
            for engine in scene.engines:
                engine.ready()
        await asyncio.wait_for(main(scene), HANG_S)
        await scene.client.close()
        assert all(engine.is_closed for engine in scene.engines)

    asyncio.run(run())


def prompt(family: int) -> list[int]:
    return [family] * 1024


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
