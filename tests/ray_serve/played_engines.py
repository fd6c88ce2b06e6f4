"""Replicas whose engines are played by hand, behind a front's `ServeLink`; Ray is not there."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any

import msgspec

from realizar.backends.base import Capacity
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import LinkListener
from realizar.engine.frontend.shared_engine import NoText
from realizar.engine.process.messages import (
    Accepted,
    Add,
    Ask,
    Command,
    EngineInfo,
    Outputs,
    Ready,
    Reply,
)
from realizar.engine.stats import EngineStats
from realizar.ray.calls import EngineCalls
from realizar.ray.reported_keys import RouteWish
from realizar.ray.serve_link import ServeLink
from realizar.request import Request
from realizar.step_deltas import ChoiceEnd, ChoiceStart, StepDeltas
from waits import HANG_S

BLOCK = 16
CLOCK_S = 5000.0  # of the replicas' host, behind ours


def its_clock() -> float:
    """The replicas' host has another clock."""
    return time.monotonic() - CLOCK_S


class PlayedLink:
    """An engine's side: what it was sent, and its listener."""

    def __init__(self, generated: int) -> None:
        self.sent: list[Command] = []
        self.news = asyncio.Event()
        self._generated = generated

    async def start(self, listener: LinkListener) -> None:
        self.listener = listener
        capacity = Capacity(BLOCK, (64,), 1, 1, 1, "none", 0.0)
        listener.handle(Ready(EngineInfo("made up", 99, 1, 64, 64, 2, capacity, 0, 1, 1, BLOCK)))

    def send(self, command: Command) -> None:
        self.sent.append(command)
        if isinstance(command, Add):
            self.news.set()
        if isinstance(command, Ask):
            stats = EngineStats(generation_tokens=self._generated) if command.what == "stats" else None
            self.listener.handle(Reply(command.number, stats))

    async def close(self, *, at_once: bool = False) -> None:
        pass

    @property
    def added(self) -> list[Request]:
        return [command.request for command in self.sent if isinstance(command, Add)]

    def accept(self) -> str:
        """Accept the last request; returns its id here."""
        request_id = self.added[-1].request_id
        self.listener.handle(Accepted(request_id))
        return request_id

    def begin(self, *tokens: int, n: int = 1, first: int = 0) -> None:
        """Accept the last request and give each choice its first token. Args: first: number of its first choice."""
        request_id = self.accept()
        starts = tuple(ChoiceStart(first + index, request_id, index, its_clock()) for index in range(n))
        self.deltas([(first + index, token) for index, token in enumerate(tokens)], starts=starts)

    def end(self, number: int = 0) -> None:
        self.deltas([], ends=(ChoiceEnd(number, "length"),))

    def deltas(self, rows: list[tuple[int, int]], **lists: Any) -> None:
        numbers, tokens = (array(kind, [row[at] for row in rows]).tobytes() for at, kind in enumerate("qi"))
        self.listener.handle(Outputs(StepDeltas(its_clock(), numbers, tokens, **lists)))


class PlayedReplicas:
    """`Engines`: the request goes to the first replica that lives and is not avoided."""

    def __init__(self, count: int) -> None:
        self.links = [PlayedLink(generated=index + 1) for index in range(count)]
        self.calls = [EngineCalls(f"replica-{index}", link, None, its_clock) for index, link in enumerate(self.links)]
        self.wishes: list[RouteWish] = []
        self._dead = [asyncio.Event() for _ in range(count)]

    async def start(self) -> None:
        for calls in self.calls:
            await calls.engine.start()

    def kill(self, index: int) -> None:
        """End a replica with its host: nothing of it comes any more."""
        self._dead[index].set()

    async def run(self, request: bytes, wish: RouteWish) -> AsyncGenerator[bytes]:
        self.wishes.append(wish)
        names = [f"replica-{index}" for index in range(len(self.calls)) if not self._dead[index].is_set()]
        index = int(next((name for name in names if name != wish.avoided), names[0])[-1])
        parts = self.calls[index].run(msgspec.msgpack.decode(request, type=Request))
        dead = asyncio.ensure_future(self._dead[index].wait())
        part: asyncio.Future[bytes | None] | None = None
        try:
            while True:
                part = asyncio.ensure_future(anext(parts, None))
                await asyncio.wait((part, dead), return_when=asyncio.FIRST_COMPLETED)
                if dead.done():
                    raise ConnectionResetError("the actor died")
                reports = part.result()
                if reports is None:
                    return
                yield reports
        finally:
            dead.cancel()
            if part is not None:
                part.cancel()
                await asyncio.gather(part, return_exceptions=True)
            await parts.aclose()

    async def info(self) -> EngineInfo:
        return self.calls[0].engine.info

    async def clear_caches(self) -> None:
        for calls in self.calls:
            await calls.engine.clear_cache()

    async def stats(self) -> Mapping[str, EngineStats]:
        return {calls.name: await calls.engine.stats() for calls in self.calls}


class Scene:
    """A front's engine over two replicas that may run two choices each, and let one wait."""

    def __init__(self) -> None:
        self.replicas = PlayedReplicas(2)
        self.engine = AsyncEngine(ServeLink(self.replicas, max_replicas=2), lambda _: NoText())
        self.one, self.two = self.replicas.links


async def turns(count: int = 30) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def play(main: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await scene.replicas.start()
        await scene.engine.start()
        await scene.engine.wait_ready()
        await asyncio.wait_for(main(scene), HANG_S)
        await scene.engine.close()

    asyncio.run(run())
