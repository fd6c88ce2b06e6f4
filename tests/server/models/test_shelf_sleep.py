"""Models that wait in the host's memory: who sleeps, who wakes, both bounds, faults, and the end of the server."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from realizar.errors import CapacityError, EngineDeadError, RealizarError
from realizar.server.app import create_app_of
from realizar.server.errors import ApiError
from realizar.server.settings import ServerSettings
from server.models.shelf_case import Case, run

THREE = {"a": 10, "b": 10, "c": 10}


def log_of(case: Case) -> str:
    """What was done before the end of the server."""
    return " ".join(case.loader.log)


def test_a_model_that_makes_room_sleeps_and_comes_back() -> None:
    seen: list[str] = []

    async def main(case: Case) -> None:
        await case.use("a", "b")
        assert [case.state(name) for name in "abc"] == ["asleep", "ready", "known"]
        status = case.shelf.find("a")
        assert (status.device, status.host_bytes, case.shelf.find("b").host_bytes) == ("cpu", 10, None)
        await case.use("a", "c", "b")
        assert [case.state(name) for name in "abc"] == ["asleep", "ready", "asleep"]
        text = (await case.shelf.exposition(())).decode()
        assert 'realizar:model_wakes_total{model_name="a"} 1.0' in text
        assert 'realizar:model_loads_total{model_name="a"} 1.0' in text
        assert 'realizar:model_planned_bytes{model_name="a"} 1.0' in text
        assert 'realizar:model_host_bytes{model_name="a"} 10.0' in text
        assert 'realizar:model_state{model_name="a",state="asleep"} 1.0' in text
        seen.append(log_of(case))

    run(main, bound=12, host=30, asleep=1, **THREE)
    assert seen == ["+a ~a +b ~b ^a ~a +c ~c ^b"]


def test_those_that_sleep_count_on_the_device_and_are_unloaded_where_that_is_too_much() -> None:
    seen: list[str] = []

    async def main(case: Case) -> None:
        await case.use("a", "b", "c")  # two asleep take 4, so that c does not fit beside them
        assert [case.state(name) for name in "abc"] == ["known", "asleep", "ready"]
        seen.append(log_of(case))

    run(main, bound=12, host=30, asleep=2, **THREE)
    assert seen == ["+a ~a +b ~b -a +c"]


def test_a_model_is_unloaded_where_its_sleep_gives_too_little() -> None:
    seen: list[str] = []

    async def main(case: Case) -> None:
        await case.use("a", "b")
        assert [case.state(name) for name in "ab"] == ["known", "ready"]
        seen.append(log_of(case))

    run(main, bound=10, host=30, asleep=1, **THREE)
    assert seen == ["+a -a +b"]


def test_the_hosts_bound_ends_the_one_that_slept_longest() -> None:
    seen: list[str] = []

    async def main(case: Case) -> None:
        await case.use("a", "b", "c")  # b sleeps once a has left the host
        assert [case.state(name) for name in "abc"] == ["known", "asleep", "ready"]
        await case.use("b")
        assert [case.state(name) for name in "abc"] == ["known", "ready", "known"]
        assert case.shelf.find("b").host_bytes == 10  # pinned for its next sleep: c finds no room
        seen.append(log_of(case))

    assert run(main, bound=12, host=10, asleep=1, **THREE).loader.most_host == 10
    assert seen == ["+a ~a +b -a ~b +c -c ^b"]


def test_a_model_too_large_for_the_host_is_unloaded() -> None:
    async def main(case: Case) -> None:
        await case.use("large", "a")
        assert [case.state(name) for name in ("large", "a")] == ["known", "ready"]

    run(main, bound=12, host=10, asleep=1, large=12, a=10)


def test_requests_that_come_while_it_falls_asleep_wake_it() -> None:
    async def main(case: Case) -> None:
        await case.use("a")
        case.loader.held.add("a")
        other = case.ask("b")
        await case.settled()
        assert case.state("a") == "finishing"
        late = case.ask("a")
        await case.settled()
        assert not other.done()
        case.loader.let_go("a")
        (await other).release()
        (await late).release()
        assert [case.state(name) for name in "ab"] == ["ready", "asleep"]

    run(main, bound=12, host=20, asleep=1, **THREE)


def test_a_model_in_use_ends_its_requests_before_it_sleeps() -> None:
    async def main(case: Case) -> None:
        lease = await case.lease("a")
        other = case.ask("b")
        await case.settled()
        assert (case.state("a"), case.loader.log) == ("finishing", ["+a"])
        lease.release()
        (await other).release()
        assert case.state("a") == "asleep"

    run(main, bound=12, host=20, asleep=1, **THREE)


def test_a_model_that_can_not_sleep_is_unloaded() -> None:
    async def main(case: Case) -> None:
        await case.use("a")
        case.loader.errors["a"] = CapacityError("the host is full")
        await case.use("b")
        del case.loader.errors["a"]
        assert [case.state(name) for name in "ab"] == ["known", "ready"]
        assert case.loader.log == ["+a", "~a", "-a", "+b"]
        await case.use("a")

    run(main, bound=12, host=20, asleep=1, **THREE)


def test_a_model_that_can_not_wake_is_loaded_anew_after_a_pause() -> None:
    async def main(case: Case) -> None:
        await case.use("a", "b")
        case.loader.errors["a"] = CapacityError("the GPU is full")
        with pytest.raises(ApiError, match="'a' could not be loaded: the GPU is full"):
            await case.use("a")
        await case.settled()
        assert case.state("a") == "failed"
        del case.loader.errors["a"]
        case.shelf._models["a"].retry_s = 0.0
        await case.use("a")
        assert case.loader.log == ["+a", "~a", "+b", "~b", "^a", "-a", "+a"]

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_an_engine_that_dies_asleep_is_loaded_by_the_next_request() -> None:
    async def main(case: Case) -> None:
        await case.use("a", "b")
        case.loader.engines["a"].die(EngineDeadError("killed"))
        await case.until("a", "failed")
        assert case.shelf.find("a").host_bytes is None
        await case.use("a")
        assert case.state("a") == "ready"

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_the_idle_time_goes_on_in_sleep() -> None:
    async def main(case: Case) -> None:
        (await case.lease("a", keep_alive_s=0.05)).release()
        await case.use("b")
        assert case.state("a") == "asleep"
        assert case.shelf.find("a").unloads_s is not None
        await case.until("a", "known")
        assert case.state("b") == "ready"

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_the_idle_time_may_end_while_a_model_falls_asleep() -> None:
    async def main(case: Case) -> None:
        (await case.lease("a", keep_alive_s=0.01)).release()
        case.loader.held.add("a")
        other = case.ask("b")
        await asyncio.sleep(0.05)
        assert case.state("a") == "finishing"
        case.loader.let_go("a")
        (await other).release()
        await case.until("a", "known")
        assert case.loader.log == ["+a", "~a", "-a", "+b"]

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_a_model_that_made_room_after_its_last_request_has_its_idle_time() -> None:
    async def main(case: Case) -> None:
        lease = await case.lease("a", keep_alive_s=0.05)
        other = case.ask("b")
        await case.settled()
        assert case.state("a") == "finishing"
        lease.release()
        (await other).release()
        assert case.state("a") == "asleep"
        assert case.shelf.find("a").unloads_s is not None
        await case.until("a", "known")
        assert case.loader.log == ["+a", "~a", "+b", "-a"]

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_a_model_without_idle_time_is_unloaded_rather_than_put_to_sleep() -> None:
    async def main(case: Case) -> None:
        lease = await case.lease("a", keep_alive_s=0)
        other = case.ask("b")
        await case.settled()
        lease.release()
        (await other).release()
        assert case.loader.log == ["+a", "-a", "+b"]

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_a_client_may_unload_a_model_that_makes_room_when_its_requests_have_ended() -> None:
    async def main(case: Case) -> None:
        lease = await case.lease("a")
        other = case.ask("b")
        await case.settled()
        transport = httpx.ASGITransport(create_app_of(case.shelf, ServerSettings(allow_request_keep_alive=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
            assert answer.json()["done_reason"] == "unload"
        await case.settled()
        assert (case.state("a"), case.loader.log) == ("finishing", ["+a"])
        lease.release()
        (await other).release()
        assert case.loader.log == ["+a", "-a", "+b"]

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_a_client_may_unload_a_model_that_sleeps() -> None:
    async def main(case: Case) -> None:
        await case.use("a", "b")
        transport = httpx.ASGITransport(create_app_of(case.shelf, ServerSettings(allow_request_keep_alive=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            (first, second) = (await client.get("/api/ps")).json()["models"]
            assert (first["state"], first["size"], first["size_vram"], first["device"]) == ("asleep", 10, 0, "cpu")
            assert second["state"] == "ready"
            answer = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
            assert answer.json()["done_reason"] == "unload"
        await case.until("a", "known")
        assert case.loader.log == ["+a", "~a", "+b", "-a"]
        case.shelf.end_sleep("b")  # it is awake
        assert case.state("b") == "ready"

    run(main, bound=12, host=30, asleep=1, **THREE)


def test_a_client_may_unload_a_model_that_falls_asleep() -> None:
    async def main(case: Case) -> None:
        await case.use("a")
        case.loader.held.add("a")
        other = case.ask("b")
        await case.settled()
        transport = httpx.ASGITransport(create_app_of(case.shelf, ServerSettings(allow_request_keep_alive=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.post("/api/generate", json={"model": "a", "keep_alive": 0})
            assert answer.json()["done_reason"] == "unload"
        assert case.state("a") == "finishing"
        case.loader.let_go("a")
        (await other).release()
        await case.until("a", "known")
        assert case.loader.log == ["+a", "~a", "-a", "+b"]

    run(main, bound=12, host=30, asleep=1, **THREE)


@pytest.mark.parametrize("stage", ["asleep", "falling asleep", "waking"])
def test_the_server_ends_whatever_a_model_does(stage: str) -> None:
    async def main(case: Case) -> None:
        await case.use("a", "b" if stage == "asleep" else "a")
        if stage != "asleep":
            case.loader.held.add("a")
            waiting = [case.ask("b")]
            await case.settled()
            if stage == "waking":
                case.loader.let_go("a")
                (await waiting[0]).release()
                case.loader.held.add("a")
                waiting.append(case.ask("a"))
                await case.settled()
                assert case.state("a") == "loading"
        closing = asyncio.create_task(case.shelf.close())
        await case.settled()
        for name in list(case.loader.held):
            case.loader.let_go(name)
        await closing
        assert [case.state(name) for name in "abc"] == ["known"] * 3

    run(main, bound=12, host=30, asleep=1, **THREE)


@pytest.mark.parametrize("seed", range(40))
def test_any_order_keeps_both_bounds_and_answers_everybody(seed: int) -> None:
    """The loader checks both bounds at every change."""
    rng = random.Random(seed)
    sizes = {name: rng.randint(3, 10) for name in "abcde"}
    options: dict[str, Any] = {"bound": rng.randint(10, 25), "host": rng.randint(0, 30), "asleep": rng.randint(0, 2)}

    async def client(case: Case, number: int) -> None:
        for _ in range(6):
            name = rng.choice("abcde")
            patience_s = 0.0005 if rng.random() < 0.2 else None
            try:
                async with asyncio.timeout(patience_s):
                    lease = await case.lease(name, rng.choice((None, None, 0.0, -1.0)))
            except TimeoutError:
                continue
            assert lease.api.model.name == name
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
            if rng.random() < 0.05:
                case.loader.engines[name].die(RealizarError("died"))
            lease.release()

    async def main(case: Case) -> None:
        await asyncio.gather(*(client(case, number) for number in range(8)))
        await case.settled()
        assert case.shelf.num_open == 0

    run(main, **options, **sizes)
