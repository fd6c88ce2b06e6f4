"""`ReplicaLink` over links that are played by hand, below a client that is real."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from realizar.backends.base import Capacity
from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.clients.async_link import LinkListener
from realizar.engine.clients.async_stream import AsyncStream
from realizar.engine.core.metrics import EngineStats
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    AskAudit,
    AskStats,
    AuditAnswer,
    CacheCleared,
    CachedKeys,
    ClearCache,
    Command,
    EngineInfo,
    Loading,
    Outputs,
    Ready,
    Refused,
    StatsAnswer,
    WatchKeys,
    record_error,
)
from realizar.errors import EngineDeadError, EngineUnavailableError, InvalidRequestError, QueueFullError, RealizarError
from realizar.kv_cache.block_keys import BlockKeys
from realizar.kv_cache.key_changes import KEY_BYTES, CacheChanges
from realizar.replicas.link import ReplicaLink
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
        elif isinstance(command, AskStats):
            self.listener.handle(StatsAnswer(command.ticket, EngineStats(num_running=1, generation_tokens=10)))
        elif isinstance(command, AskAudit):
            self.listener.handle(AuditAnswer(command.ticket, "a block is lost"))
        elif isinstance(command, ClearCache):
            self.listener.handle(CacheCleared(command.ticket))

    async def close(self, *, at_once: bool = False) -> None:
        self.is_closed = True

    def ready(self, max_running: int = 2) -> None:
        capacity = Capacity(BLOCK, (64,), 2, 16, 64, 100, 1, 1000, "none", 0.0)
        info = EngineInfo("made up", 99, 1, 4096, 4096, max_running, capacity, 7, 3, 1, BLOCK)
        self.listener.handle(Ready(info))

    @property
    def added(self) -> list[str]:
        return [command.request.request_id for command in self.sent if isinstance(command, Add)]

    def begin(self, name: str) -> None:
        """Give a request its first token."""
        number = self.numbers[name] = len(self.numbers)
        numbers, tokens = array("q", [number]).tobytes(), array("i", [5]).tobytes()
        self.listener.handle(
            Outputs(StepDeltas(1.0, numbers, b"", tokens, starts=(ChoiceStart(number, name, 0, 0.5),)))
        )

    def end(self, name: str) -> None:
        self.listener.handle(Outputs(StepDeltas(1.0, ends=(ChoiceEnd(self.numbers[name], "length"),))))

    def die(self, *, restarting: bool = True) -> None:
        self.listener.lost(EngineDeadError("it was killed"), restarting=restarting)
        self.numbers.clear()

    def hold(self, token_ids: list[int]) -> None:
        """Report the blocks of a prompt as cached."""
        keys = BlockKeys(BLOCK, None).of(np.array(token_ids, np.int32))
        self.listener.handle(CachedKeys(CacheChanges(b"".join(key[:KEY_BYTES] for key in keys))))


class PlainText:
    """A `GrowingText` that says how many tokens came."""

    may_stop = False
    stop_string = None

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

    async def add(self, name: str, token_ids: list[int]) -> AsyncStream:
        return await self.client.generate(token_ids, SamplingParams(max_tokens=8, seed=1), request_id=name)

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


def test_it_is_ready_when_all_were_tried_and_adds_up_what_they_can_do() -> None:
    async def main(scene: Scene) -> None:
        first, second = scene.engines
        second.listener.handle(Loading("reading weights", 0.5))
        assert scene.client.loading == Loading("replica 1: reading weights", 0.5)
        first.ready()
        assert scene.client.state == "starting"
        second.ready(max_running=3)
        assert scene.client.state == "ready"
        info = scene.client.info
        assert (info.max_running, info.queue_length, info.max_request_tokens) == (5, 6, 4096)
        assert (info.capacity.kv_cache_bytes, info.capacity.num_blocks) == (2000, (128,))
        assert [type(command) for command in first.sent] == [WatchKeys]
        second.die()
        assert (scene.client.state, scene.client.info.max_running) == ("ready", 2)

    play(2, main, ready=False)


@pytest.mark.parametrize("restarting", [True, False])
def test_a_replica_that_dies_before_all_were_ready(restarting: bool) -> None:
    """A crash is tried again; what can't load ends the server."""

    async def main(scene: Scene) -> None:
        scene.engines[0].die(restarting=restarting)
        scene.engines[1].ready()
        assert scene.client.state == ("ready" if restarting else "dead")
        assert restarting or "replica 0: it was killed" in str(scene.client.error)

    play(2, main, ready=False)


def test_requests_go_where_their_blocks_are_and_numbers_stay_apart() -> None:
    async def main(scene: Scene) -> None:
        scene.engines[0].hold(prompt(1))
        scene.engines[1].hold(prompt(2))
        streams = [await scene.add(f"{family}{turn}", prompt(family)) for turn in "ab" for family in (1, 2)]
        assert [engine.added for engine in scene.engines] == [["1a", "1b"], ["2a", "2b"]]
        assert [stream.replica for stream in streams] == ["0", "1", "0", "1"]
        for engine in scene.engines:
            for name in engine.added:
                engine.begin(name)
            for name in engine.added:
                engine.end(name)
        assert [(await stream.result()).outputs[0].text for stream in streams] == ["x"] * 4
        assert [status.num_requests for status in scene.link.statuses()] == [0, 0]
        assert [status.num_keys for status in scene.link.statuses()] == [256, 256]

    play(2, main)


def test_an_abort_goes_to_the_engine_that_has_the_request() -> None:
    async def main(scene: Scene) -> None:
        stream = await scene.add("a", prompt(1))
        owner = scene.owner("a")
        stream.close()
        assert owner.sent[-1] == Abort("a")
        assert all(status.num_requests == 0 for status in scene.link.statuses())

    play(2, main)


def test_a_dead_engine_ends_what_had_begun_and_the_rest_moves_once() -> None:
    async def main(scene: Scene) -> None:
        begun, waiting = await scene.add("begun", prompt(1)), await scene.add("waiting", prompt(1))
        other = await scene.add("other", prompt(2))
        first = scene.owner("begun")
        assert scene.owner("waiting") is first is not scene.owner("other")
        first.begin("begun")
        first.die()
        with pytest.raises(EngineDeadError, match=r"replica \d: it was killed"):
            await begun.result()
        assert not waiting.done
        assert not other.done
        second = scene.owner("other")
        assert second.added == ["other", "waiting"]
        assert (scene.link.num_moved, waiting.replica) == (1, other.replica)
        second.begin("waiting")
        second.end("waiting")
        assert (await waiting.result()).outputs[0].text == "x"
        third = await scene.add("third", prompt(1))  # its family's replica is gone
        assert third.replica == other.replica
        stats = await scene.client.stats()
        assert (stats.num_running, stats.num_restarts) == (1, 1)

    play(2, main)


def test_a_request_whose_second_engine_dies_too_is_thought_to_be_the_cause() -> None:
    async def main(scene: Scene) -> None:
        await scene.add("beside", prompt(1))
        stream = await scene.add("poison", prompt(1))
        for _ in range(2):
            assert not stream.done
            scene.engines[int(stream.replica)].die()
        with pytest.raises(EngineDeadError):
            await stream.result()

    play(3, main)


def test_a_request_that_was_alone_with_its_engine_does_not_move() -> None:
    async def main(scene: Scene) -> None:
        stream = await scene.add("alone", prompt(1))
        scene.owner("alone").die()
        with pytest.raises(EngineDeadError):
            await stream.result()
        assert scene.link.num_moved == 0
        again = await scene.add("again", prompt(1))
        scene.owner("again").die()
        assert again.done
        scene.engines[0].ready()
        with pytest.raises(InvalidRequestError, match="engine stopped each time"):  # not one engine after another
            await scene.add("once more", prompt(1))

    play(2, main)


def test_without_any_engine_all_requests_end_and_the_client_waits_for_one() -> None:
    async def main(scene: Scene) -> None:
        streams = [await scene.add(f"{family}", prompt(family)) for family in range(4)]
        for engine in scene.engines:
            engine.die()
        for stream in streams:
            with pytest.raises(EngineDeadError):
                await stream.result()
        assert scene.client.state == "starting"
        with pytest.raises(EngineUnavailableError):
            await scene.add("later", prompt(1))
        scene.engines[1].ready()
        assert scene.client.state == "ready"
        await scene.add("later", prompt(1))
        assert scene.engines[1].added[-1] == "later"
        assert (await scene.client.stats()).num_restarts == 2

    play(2, main)


def test_a_restarted_engine_holds_nothing() -> None:
    async def main(scene: Scene) -> None:
        scene.engines[0].hold(prompt(1))
        scene.engines[0].die()
        scene.engines[0].ready()
        scene.engines[1].hold(prompt(1))
        assert (await scene.add("a", prompt(1))).replica == "1"

    play(2, main)


def test_refusals_reach_the_client_also_after_a_move() -> None:
    async def main(scene: Scene) -> None:
        with pytest.raises(InvalidRequestError, match="too large"):
            await scene.add("large", [98] * 4)
        begun, moved = await scene.add("begun", prompt(1)), await scene.add("moved", prompt(1))
        owner = scene.owner("moved")
        owner.begin("begun")
        owner.die()
        other = next(engine for engine in scene.engines if engine is not owner)
        assert begun.done
        other.listener.handle(Refused("moved", record_error(QueueFullError("full", 2.0))))
        with pytest.raises(QueueFullError):
            await moved.result()

    play(2, main)


def test_audits_and_clearing_ask_every_engine() -> None:
    async def main(scene: Scene) -> None:
        assert await scene.client.audit() == "replica 0: a block is lost; replica 1: a block is lost"
        await scene.client.clear_cache()
        assert all(any(isinstance(each, ClearCache) for each in engine.sent) for engine in scene.engines)
        with pytest.raises(RealizarError, match="take no Sleep"):
            await scene.client.sleep()

    play(2, main)


def test_a_rolling_restart_replaces_engines_one_by_one_when_they_have_no_request() -> None:
    async def main(scene: Scene) -> None:
        before = scene.engines
        held = {(await scene.add(f"{family}", prompt(family))).replica: f"{family}" for family in (1, 2)}
        assert held.keys() == {"0", "1"}
        scene.link.restart_in_turn()
        await turns()
        assert [status.state for status in scene.link.statuses()] == ["draining", "ready"]
        assert scene.client.info.max_running == 2
        assert {(await scene.add(f"late {family}", prompt(family))).replica for family in (1, 2)} == {"1"}
        assert scene.engines == before
        before[0].begin(held["0"])
        before[0].end(held["0"])
        await turns()
        assert before[0].is_closed
        assert scene.engines[0] is not before[0]
        assert scene.engines[1] is before[1]
        scene.engines[0].ready()
        await turns()
        assert [status.state for status in scene.link.statuses()] == ["ready", "draining"]
        for name in (held["1"], "late 1", "late 2"):
            before[1].begin(name)
            before[1].end(name)
        await turns()
        scene.engines[1].ready()
        await turns()
        assert before[1].is_closed
        assert [status.state for status in scene.link.statuses()] == ["ready", "ready"]
        assert scene.client.info.max_running == 4
        assert (await scene.client.stats()).num_restarts == 0

    play(2, main)


def test_the_last_ready_engine_is_not_drained() -> None:
    async def main(scene: Scene) -> None:
        before = scene.engines
        before[1].die()
        scene.link.restart_in_turn()
        await turns()
        assert scene.engines[0] is before[0]
        assert scene.link.statuses()[0].state == "ready"
        before[1].ready()
        await turns()
        assert scene.engines[0] is not before[0]

    play(2, main)


def test_the_log_says_why_a_replica_gets_no_engine_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def main(scene: Scene) -> None:
        scene.engines[0].die(restarting=False)
        assert scene.link.statuses()[0].state == "down"

    play(2, main)
    assert any("replica 0" in line and "it was killed" in line for line in caplog.messages)
