"""A rolling restart of replicas whose engines are played by hand."""

from __future__ import annotations

import pytest

from realizar.errors import QueueFullError
from replicas.played_replicas import Scene, play, prompt, turns


def test_a_rolling_restart_replaces_engines_one_by_one_when_they_have_no_request() -> None:
    async def main(scene: Scene) -> None:
        before = scene.engines
        held = {(await scene.add(f"{family}", prompt(family))).replica: f"{family}" for family in (1, 2)}
        assert held.keys() == {"0", "1"}
        scene.link.restart_in_turn()
        await turns()
        assert [replica.state for replica in scene.link.replicas] == ["draining", "ready"]
        assert scene.client.info.max_running == 4
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
        assert [replica.state for replica in scene.link.replicas] == ["ready", "draining"]
        for name in (held["1"], "late 1", "late 2"):
            before[1].begin(name)
            before[1].end(name)
        await turns()
        scene.engines[1].ready()
        await turns()
        assert before[1].is_closed
        assert [replica.state for replica in scene.link.replicas] == ["ready", "ready"]
        assert scene.client.info.max_running == 4
        assert (await scene.client.stats()).num_restarts == 0

    play(2, main)


def test_every_state_is_reported() -> None:
    async def main(scene: Scene) -> None:
        reported: list[list[str]] = []
        scene.link.when_changed(lambda states: reported.append([*states]))
        scene.link.restart_in_turn()
        await turns()
        scene.engines[0].ready()
        scene.engines[0].die(restarting=False)
        assert reported == [
            ["ready", "ready"],
            ["draining", "ready"],
            ["starting", "ready"],
            ["ready", "ready"],
            ["down", "ready"],
        ]

    play(2, main)


def test_as_many_requests_wait_as_ever_while_an_engine_is_replaced() -> None:
    async def main(scene: Scene) -> None:
        first, idle = scene.engines
        first.hold(prompt(1))
        names = [f"{number}" for number in range(5)]  # as many as one replica runs and queues
        for name in names:
            await scene.add(name, prompt(1))
        assert first.added == names
        scene.link.restart_in_turn()
        await turns()
        await scene.add("late", prompt(1))
        assert idle.added == ["late"]
        for name in names:
            first.begin(name)
            first.end(name)
        await turns()
        assert scene.link.replicas[0].state == "starting"
        for number in range(9):
            await scene.add(f"waits {number}", prompt(1))
        with pytest.raises(QueueFullError):
            await scene.add("too many", prompt(1))

    play(2, main)


def test_a_draining_engine_stays_while_no_other_is_ready() -> None:
    async def main(scene: Scene) -> None:
        first, other = scene.engines
        first.hold(prompt(1))
        await scene.add("held", prompt(1))
        scene.link.restart_in_turn()
        await turns()
        other.die()
        first.begin("held")
        first.end("held")
        await turns()
        assert scene.engines[0] is first
        await scene.add("late", prompt(1))
        assert first.added == ["held", "late"]
        other.ready()
        first.begin("late")
        first.end("late")
        await turns()
        assert scene.engines[0] is not first

    play(2, main)


def test_the_last_ready_engine_is_not_drained() -> None:
    async def main(scene: Scene) -> None:
        before = scene.engines
        before[1].die()
        scene.link.restart_in_turn()
        await turns()
        assert scene.engines[0] is before[0]
        assert scene.link.replicas[0].state == "ready"
        before[1].ready()
        await turns()
        assert scene.engines[0] is not before[0]

    play(2, main)
