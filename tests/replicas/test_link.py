"""`ReplicaLink` over links that are played by hand, below a client that is real."""

from __future__ import annotations

import pytest

from realizar.engine.process.messages import (
    Abort,
    Ask,
    Loading,
    Refused,
    WatchKeys,
)
from realizar.errors import EngineDeadError, EngineUnavailableError, InvalidRequestError, QueueFullError, RealizarError
from realizar.ipc.error_records import record_error
from realizar.request import Client
from replicas.played_replicas import Scene, play, prompt


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

    play(2, main, ready=False)


def test_the_room_of_a_replica_counts_while_it_gets_another_engine_soon() -> None:
    async def main(scene: Scene) -> None:
        first, second = scene.engines
        room = scene.client.info.max_running + scene.client.max_queued
        assert room == 2 * (2 + 3)
        second.die()
        assert (scene.client.state, scene.client.info.max_running) == ("ready", 4)
        for number in range(room):
            await scene.add(f"{number}", prompt(1))
        assert len(first.added) == room
        with pytest.raises(QueueFullError, match="limit 10"):
            await scene.add("too many", prompt(1))
        second.die(restarting=False)
        assert scene.client.info.max_running == 2
        second.ready()
        assert scene.client.info.max_running == 4

    play(2, main)


def test_a_client_that_fills_the_queues_of_all_replicas_keeps_no_other_out() -> None:
    async def main(scene: Scene) -> None:
        greedy = Client("greedy")
        for number in range(scene.client.info.max_running + scene.client.max_queued):
            await scene.add(f"{number}", prompt(1), greedy)
        with pytest.raises(QueueFullError):
            await scene.add("too many", prompt(1), greedy)
        for number in range(100):
            await scene.add(f"other {number}", prompt(1), Client(f"{number}"))
        assert sum(len(engine.added) for engine in scene.engines) == 110

    play(2, main)


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
        assert [len(replica.requests) for replica in scene.link.replicas] == [0, 0]
        assert [scene.link.num_keys(replica) for replica in scene.link.replicas] == [256, 256]

    play(2, main)


def test_an_abort_goes_to_the_engine_that_has_the_request() -> None:
    async def main(scene: Scene) -> None:
        stream = await scene.add("a", prompt(1))
        owner = scene.owner("a")
        stream.close()
        assert owner.sent[-1] == Abort("a")
        assert all(len(replica.requests) == 0 for replica in scene.link.replicas)

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


def test_a_request_that_was_alone_with_its_engine_goes_elsewhere_and_ends_no_third_one() -> None:
    async def main(scene: Scene) -> None:
        stream = await scene.add("alone", prompt(1))
        scene.owner("alone").die()
        assert not stream.done
        assert scene.link.num_moved == 1
        scene.engines[int(stream.replica)].die()
        with pytest.raises(EngineDeadError):
            await stream.result()
        with pytest.raises(InvalidRequestError, match="engine stopped each time"):
            await scene.add("again", prompt(1))
        innocent = await scene.add("innocent", prompt(2))
        assert not innocent.done

    play(3, main)


def test_a_request_that_ends_well_after_its_engine_died_is_no_suspect() -> None:
    async def main(scene: Scene) -> None:
        for turn in ("once", "twice", "thrice"):
            stream = await scene.add(turn, prompt(1))
            scene.owner(turn).die()
            other = scene.engines[int(stream.replica)]
            other.begin(turn)
            other.end(turn)
            assert (await stream.result()).outputs[0].text == "x"
            for engine in scene.engines:
                engine.ready()

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
        assert all(
            "clear_cache" in [each.what for each in engine.sent if isinstance(each, Ask)] for engine in scene.engines
        )
        with pytest.raises(RealizarError, match="several engines can't sleep"):
            await scene.client.sleep()

    play(2, main)


def test_the_log_says_why_a_replica_gets_no_engine_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    async def main(scene: Scene) -> None:
        scene.engines[0].die(restarting=False)
        assert scene.link.replicas[0].state == "down"

    play(2, main)
    assert any("replica 0" in line and "it was killed" in line for line in caplog.messages)
