"""A front's engine over replicas: what goes to them, what comes back, and what becomes of it when one is lost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from ray_serve.played_engines import BLOCK, Scene, play, turns
from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Ask,
    CachedKeys,
    EngineLost,
    Refused,
    WatchKeys,
)
from realizar.errors import EngineDeadError, EngineUnavailableError, InvalidRequestError
from realizar.ipc.error_records import record_error
from realizar.kv_cache.block_keys import BlockKeys, CacheChanges
from realizar.ray.reported_keys import KEY_BYTES, MOST_KEYS, HeldBlocks, read_report
from realizar.replicas.routing import KeyChanges, KeyReport
from realizar.sampling_params import SamplingParams

PROMPT = tuple(range(2 * BLOCK + 3))


def opening(scene: Scene, n: int = 1, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> asyncio.Task[AsyncStream]:
    return asyncio.create_task(scene.engine.generate(prompt, SamplingParams(n=n, max_tokens=8, seed=1), **fields))


def test_an_answer_comes_back_with_times_of_this_clock() -> None:
    async def main(scene: Scene) -> None:
        before_s = time.monotonic()
        task = opening(scene)
        await turns()
        scene.one.begin(7)
        stream = await task
        scene.one.deltas([(0, 8)])
        scene.one.end()
        output = await stream.result()
        assert output.outputs[0].token_ids == (7, 8)
        assert before_s <= output.timings.first_token_s <= time.monotonic()
        assert scene.two.added == []

    play(main)


def test_choices_of_two_replicas_with_one_number_stay_apart() -> None:
    async def main(scene: Scene) -> None:
        tasks = []
        for link, token in ((scene.one, 7), (scene.two, 9)):
            tasks.append(opening(scene))
            await turns()
            link.begin(token)
            scene.replicas.calls.reverse()  # the next one goes to the other
            scene.replicas.links.reverse()
        streams = [await task for task in tasks]
        for link in (scene.one, scene.two):
            link.deltas([(0, 1)])
            link.end()
        outputs = [await stream.result() for stream in streams]
        assert [output.outputs[0].token_ids for output in outputs] == [(7, 1), (9, 1)]

    play(main)


def test_the_room_is_that_of_all_replicas() -> None:
    async def main(scene: Scene) -> None:
        assert (scene.engine.info.max_running, scene.engine.max_queued) == (4, 2)

    play(main)


def test_figures_are_those_of_all_engines() -> None:
    async def main(scene: Scene) -> None:
        assert (await scene.engine.stats()).generation_tokens == 1 + 2

    play(main)


def test_a_queued_request_of_a_lost_replica_goes_to_another() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene)
        await turns()
        scene.one.accept()
        stream = await task
        scene.replicas.kill(0)
        await scene.two.news.wait()
        await turns()
        assert scene.replicas.wishes[-1].avoided == "replica-0"
        scene.two.begin(5)
        scene.two.end()
        assert (await stream.result()).outputs[0].token_ids == (5,)

    play(main)


def test_a_queued_request_goes_to_no_third_engine() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene)
        for link, other in ((scene.one, scene.two), (scene.two, scene.one)):
            await link.news.wait()
            await turns()
            link.accept()
            stream = await task
            num_added = len(other.added)
            link.listener.handle(EngineLost(record_error(EngineDeadError("out of luck")), restarting=True))
        with pytest.raises(EngineDeadError, match="out of luck"):
            await stream.result()
        assert len(other.added) == num_added == 1

    play(main)


def test_a_running_request_of_a_lost_replica_gets_one_error() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene)
        await turns()
        scene.one.begin(5)
        stream = await task
        scene.replicas.kill(0)
        with pytest.raises(EngineDeadError, match="is gone"):
            await stream.result()
        assert scene.two.added == []
        assert scene.engine.state == "ready"

    play(main)


def test_a_running_request_of_an_engine_that_dies_gets_its_reason() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene)
        await turns()
        scene.one.begin(5)
        stream = await task
        scene.one.listener.handle(EngineLost(record_error(EngineDeadError("out of luck")), restarting=True))
        with pytest.raises(EngineDeadError, match="out of luck"):
            await stream.result()

    play(main)


def test_a_request_that_no_replica_can_take_is_refused_in_the_end() -> None:
    async def main(scene: Scene) -> None:
        for link in (scene.one, scene.two):
            link.listener.handle(EngineLost(record_error(EngineDeadError("out of luck")), restarting=True))
        with pytest.raises(EngineUnavailableError):
            await opening(scene)

    play(main)


def test_a_refusal_comes_through() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene)
        await turns()
        name = scene.one.added[-1].request_id
        scene.one.listener.handle(Refused(name, record_error(InvalidRequestError("no", "top_k"))))
        with pytest.raises(InvalidRequestError) as caught:
            await task
        assert caught.value.param == "top_k"
        assert scene.two.added == []

    play(main)


def test_a_request_that_is_closed_ends_in_its_replica() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene)
        await turns()
        scene.one.begin(5)
        (await task).close()
        await turns()
        name = scene.one.added[-1].request_id
        assert Abort(name) in scene.one.sent
        assert scene.replicas.wishes[-1].has_ended

    play(main)


def test_a_request_ends_in_its_replica_when_the_text_of_all_choices_is_complete() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene, n=2)
        await turns()
        scene.one.begin(5, 6, n=2)
        stream = await task
        aborted = Abort(scene.one.added[-1].request_id)
        scene.engine.end_choice(stream.request_id, 0)
        scene.engine._link.send(Abort(stream.request_id, 0))
        await turns()
        assert aborted not in scene.one.sent
        scene.engine._link.send(Abort(stream.request_id, 1))
        await turns()
        assert aborted in scene.one.sent

    play(main)


def test_a_wish_has_the_keys_under_the_salt_and_follows_the_request() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene, cache_salt="pepper")
        await turns()
        (wish,) = scene.replicas.wishes
        keys = BlockKeys(BLOCK, "pepper").of(np.array(PROMPT, np.int32))
        assert [*wish.keys] == [key[:KEY_BYTES] for key in keys]
        assert (wish.num_tokens, wish.num_choices) == (len(PROMPT), 1)
        assert len(keys) == 2
        assert not wish.has_begun
        scene.one.begin(5)
        await task
        await turns()
        assert wish.has_begun
        assert not wish.has_ended
        scene.one.end()
        await turns()
        assert wish.has_ended

    play(main)


def test_a_replica_reports_what_its_engine_holds_until_that_dies() -> None:
    async def main(scene: Scene) -> None:
        one, two = b"a" * 16, b"b" * 16
        calls = scene.replicas.calls[0]
        assert WatchKeys() in scene.one.sent
        for changes in (CacheChanges(one + two, complete=True), CacheChanges(removed=one)):
            scene.one.listener.handle(CachedKeys(changes))
        report = read_report(calls.report())
        assert report == KeyReport(0, 2, KeyChanges([two[:KEY_BYTES]]), complete=True)
        scene.one.listener.handle(CachedKeys(CacheChanges(ends_added=two)))
        assert read_report(calls.report()).ends == KeyChanges([two[:KEY_BYTES]])  # type: ignore[union-attr]
        scene.one.listener.handle(EngineLost(record_error(EngineDeadError("out of luck")), restarting=True))
        after = read_report(calls.report())
        assert after is not None
        assert (after.incarnation, after.blocks.added) == (1, [])

    play(main)


def test_a_report_of_too_many_keys_has_the_oldest_and_the_newest() -> None:
    held = HeldBlocks()
    keys = [number.to_bytes(16, "little") for number in range(MOST_KEYS + 3)]
    held.take(CacheChanges(b"".join(keys), complete=True))
    report = read_report(held.report(0))
    assert report is not None
    sent = keys[: MOST_KEYS // 2] + keys[MOST_KEYS // 2 + 3 :]
    assert report.blocks.added == [key[:KEY_BYTES] for key in sent]


def test_every_cache_is_cleared() -> None:
    async def main(scene: Scene) -> None:
        await scene.engine.clear_cache()
        assert all(
            "clear_cache" in [each.what for each in link.sent if isinstance(each, Ask)]
            for link in (scene.one, scene.two)
        )

    play(main)


def test_an_id_that_is_in_use_is_refused() -> None:
    async def main(scene: Scene) -> None:
        task = opening(scene, request_id="mine")
        await turns()
        scene.one.listener.handle(Accepted(scene.one.added[-1].request_id))
        await task
        with pytest.raises(InvalidRequestError, match="in use"):
            await opening(scene, request_id="mine")

    play(main)
