"""Models that take turns in a bounded memory: queues, leases, failures, cancellation, and the end of the server."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from realizar.errors import EngineDeadError, EngineUnavailableError, QueueFullError, RealizarError
from realizar.request import NO_CLIENT, Client
from realizar.server.errors import ApiError
from server.models.shelf_case import Case, run


def test_a_model_is_loaded_on_first_use_and_once_for_all_who_wait() -> None:
    async def main(case: Case) -> None:
        assert [case.state(name) for name in "abc"] == ["known"] * 3
        case.loader.held.add("a")
        waiting = [case.ask("a") for _ in range(5)]
        await case.settled()
        assert case.state("a") == "loading"
        assert not any(task.done() for task in waiting)
        case.loader.let_go("a")
        leases = [await task for task in waiting]
        assert case.state("a") == "ready"
        assert {lease.api.model.name for lease in leases} == {"a"}
        assert case.shelf.num_open == 5
        for lease in leases:
            lease.release()
        assert case.shelf.num_open == 0
        assert case.state("a") == "ready"

    assert run(main).loader.log[0:1] == ["+a"]


def test_the_least_recently_used_one_makes_room() -> None:
    async def main(case: Case) -> None:
        await case.use("a", "b", "a", "c")  # b was used before a
        assert [case.state(name) for name in "abc"] == ["ready", "known", "ready"]

    assert run(main).loader.log[:4] == ["+a", "+b", "-b", "+c"]


def test_a_large_one_unloads_as_few_as_it_needs() -> None:
    async def main(case: Case) -> None:
        await case.use("small", "medium", "large")
        assert case.state("small") == "ready"
        assert [case.state("medium"), case.state("large")] == ["known", "ready"]

    run(main, bound=10, small=1, medium=5, large=8)


def test_memory_counts_until_an_engine_has_ended() -> None:
    async def main(case: Case) -> None:
        await case.use("a")
        case.loader.held.add("a")
        waiting = case.ask("b")
        await case.settled()
        assert case.state("a") == "finishing"
        assert case.loader.log == ["+a", "-a"]
        case.loader.let_go("a")
        (await waiting).release()

    assert run(main, bound=1).loader.most == 1


def test_requests_that_run_end_first_and_later_ones_wait_for_their_turn() -> None:
    async def main(case: Case) -> None:
        running = await case.lease("a")
        other = case.ask("b")
        await case.settled()
        assert case.state("a") == "finishing"
        late = case.ask("a")
        await case.settled()
        assert not other.done()
        assert not late.done()
        running.release()
        lease = await other  # before the later request, though its model was loaded
        await case.settled()
        assert not late.done()
        lease.release()
        (await late).release()

    assert run(main, bound=1).loader.log[:5] == ["+a", "-a", "+b", "-b", "+a"]


def test_a_request_that_goes_leaves_the_others_as_they_were() -> None:
    async def main(case: Case) -> None:
        running = await case.lease("a")
        other = case.ask("b")
        await case.settled()
        late = case.ask("a")
        await case.settled()
        other.cancel()  # nobody wants b any more: a stays, and takes requests again
        lease = await late
        assert case.state("a") == "ready"
        assert case.state("b") == "known"
        lease.release()
        running.release()

    assert run(main, bound=1).loader.log[:2] == ["+a", "-a"]  # at the end


def test_a_load_for_nobody_makes_room() -> None:
    async def main(case: Case) -> None:
        case.loader.held.add("a")
        gone = case.ask("a")
        await case.settled()
        gone.cancel()
        await case.settled()
        assert case.state("a") == "loading"
        (await case.lease("b")).release()
        assert case.state("a") == "known"

    run(main, bound=1)


def test_a_load_that_is_given_up_before_it_begins_leaves_its_room() -> None:
    async def main(case: Case) -> None:
        gone = asyncio.create_task(case.shelf.wait("a", NO_CLIENT))
        other = asyncio.create_task(case.shelf.wait("b", NO_CLIENT))
        await asyncio.sleep(0)  # both wait; the load of a is spawned, and has not begun
        gone.cancel()
        (await other).release()
        assert case.state("a") == "known"
        await case.use("a")

    run(main, bound=1)


def test_a_lease_that_nobody_takes_any_more_is_given_back() -> None:
    async def main(case: Case) -> None:
        case.loader.held.add("a")
        waiting = case.ask("a")
        await case.settled()
        case.loader.let_go("a")
        await case.until("a", "ready")
        waiting.cancel()  # it has its lease by now, and has not run since
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert case.shelf.num_open == 0

    run(main)


def test_a_failed_load_answers_those_who_wait_and_harms_nobody_else() -> None:
    async def main(case: Case) -> None:
        running = await case.lease("b")
        case.loader.held.add("a")
        case.loader.errors["a"] = RealizarError("/models/a.gguf: offset 0: not a GGUF file")
        waiting = [case.ask("a") for _ in range(3)]
        await case.settled()
        case.loader.let_go("a")
        for task in waiting:
            with pytest.raises(ApiError, match=r"^The model 'a' could not be loaded: a file: offset 0") as caught:
                await task
            assert (caught.value.status, caught.value.code) == (503, "model_not_loaded")
            assert int(caught.value.headers["retry-after"]) >= 1
        assert case.state("a") == "failed"
        assert "not a GGUF file" in str(case.shelf.find("a").reason)
        with pytest.raises(ApiError, match="could not be loaded"):  # at once, without another load
            await case.lease("a")
        assert case.loader.log == ["+b", "+a"]
        await case.use("b", "c")
        running.release()
        del case.loader.errors["a"]
        case.shelf._models["a"].retry_s = 0.0  # the pause is over
        await case.use("a")
        assert case.state("a") == "ready"
        assert case.shelf.find("a").reason is None

    run(main, bound=3)


def test_a_fault_of_this_program_while_loading_is_an_error_too(caplog: pytest.LogCaptureFixture) -> None:
    async def main(case: Case) -> None:
        case.loader.errors["a"] = ZeroDivisionError("x")  # type: ignore[assignment]
        with pytest.raises(ApiError, match="ZeroDivisionError"):
            await case.lease("a")
        await case.use("b")

    asyncio_log = caplog.at_level("CRITICAL", "asyncio")
    with asyncio_log:
        run(main)


def test_failures_in_a_row_make_the_pause_longer() -> None:
    async def main(case: Case) -> None:
        model = case.shelf._models["a"]
        case.loader.errors["a"] = RealizarError("no")
        pauses = []
        for _ in range(8):
            model.retry_s = 0.0
            with pytest.raises(ApiError):
                await case.lease("a")
            pauses.append(model.retry_s - asyncio.get_running_loop().time())
        assert [round(pause) for pause in pauses] == [1, 2, 4, 8, 16, 30, 30, 30]

    run(main)


def test_the_end_of_one_engine_leaves_the_others_serving() -> None:
    async def main(case: Case) -> None:
        broken, other = await case.lease("a"), await case.lease("b")
        case.loader.engines["a"].die(EngineDeadError("it was killed"))
        await case.until("a", "failed")
        assert case.state("b") == "ready"
        broken.release()  # long after its engine has gone
        await case.use("b", "c", "a")
        assert case.loader.log == ["+a", "+b", "-a", "+c", "-c", "+a"]
        assert case.shelf.num_open == 1
        other.release()

    run(main, bound=2)


def test_a_full_queue_of_waiting_requests() -> None:
    async def main(case: Case) -> None:
        case.loader.held.add("a")
        waiting = [case.ask("a") for _ in range(3)]
        await case.settled()
        with pytest.raises(QueueFullError, match="3 requests wait for the model a"):
            await case.lease("a")
        case.loader.let_go("a")
        for task in waiting:
            (await task).release()

    run(main, max_open=3)


def test_a_client_that_fills_the_queue_of_waiting_requests_keeps_no_other_out() -> None:
    async def main(case: Case) -> None:
        case.loader.held.add("a")
        waiting = [case.ask("a", Client("greedy")) for _ in range(3)]
        waiting += [case.ask("a", Client(f"other {number}")) for number in range(20)]
        await case.settled()
        with pytest.raises(QueueFullError, match="3 requests wait for the model a"):
            await case.lease("a", client=Client("greedy"))
        assert not any(task.done() for task in waiting)
        case.loader.let_go("a")
        for task in waiting:
            (await task).release()
        assert case.shelf._models["a"].places.num_taken == 0

    run(main, max_open=3)


def test_an_idle_time_and_a_request_s_own() -> None:
    async def main(case: Case) -> None:
        (await case.lease("a", keep_alive_s=0)).release()
        await case.until("a", "known")
        (await case.lease("a", keep_alive_s=-1)).release()
        assert case.shelf.find("a").unloads_s is None
        (await case.lease("b")).release()
        assert case.shelf.find("b").unloads_s is not None
        await case.until("b", "known")
        assert case.state("a") == "ready"
        lease = await case.lease("b")
        assert case.shelf.find("b").unloads_s is None  # it is in use
        lease.release()

    run(main, keep_alive_s=0.01)


def test_the_idle_time_begins_anew_with_each_request() -> None:
    async def main(case: Case) -> None:
        (await case.lease("a")).release()
        first = case.shelf._models["a"].unloads_s
        await asyncio.sleep(0.001)
        (await case.lease("a")).release()
        second = case.shelf._models["a"].unloads_s
        assert first is not None
        assert second is not None
        assert second > first

    run(main, keep_alive_s=1000.0)


def test_a_load_that_nobody_waited_for_has_its_idle_time_too() -> None:
    async def main(case: Case) -> None:
        case.loader.held.add("a")
        gone = case.ask("a")
        await case.settled()
        gone.cancel()
        await case.settled()
        case.loader.let_go("a")
        await case.until("a", "ready")
        assert case.shelf.find("a").unloads_s is not None
        await case.until("a", "known")

    run(main, keep_alive_s=0.01)


def test_draining_waits_for_running_requests_and_refuses_waiting_ones() -> None:
    async def main(case: Case) -> None:
        running = await case.lease("a")
        case.loader.held.add("b")
        waiting = case.ask("b")
        await case.settled()
        drained = asyncio.create_task(case.shelf.drain())
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await waiting
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            await case.lease("a")
        await case.settled()
        assert not drained.done()
        running.release()
        await drained
        await case.shelf.close()  # b is still being loaded
        assert case.shelf.state == "dead"
        assert case.loader._there == {}

    run(main)


def test_closing_at_once_ends_all_engines() -> None:
    async def main(case: Case) -> None:
        await case.lease("a")
        case.loader.held.add("b")
        waiting = case.ask("b")
        await case.settled()
        await case.shelf.close(at_once=True)
        with pytest.raises(EngineUnavailableError):
            await waiting
        assert case.loader._there == {}
        await case.shelf.wait_dead()
        await case.shelf.close()

    run(main)


def test_devices_have_memory_of_their_own() -> None:
    from realizar.server.models.shelf import ModelShelf
    from server.models.shelf_case import ScriptedLoader, known

    async def main() -> None:
        loader = ScriptedLoader({"a": 2, "b": 2, "c": 2}, 4)
        models = [known("a", 2), known("b", 2, device="cuda:0"), known("c", 2)]
        shelf = ModelShelf(models, loader.load, {"cpu": 2, "cuda:0": 2})
        for name in "abc":
            (await shelf.wait(name, NO_CLIENT)).release()
        assert [each.state for each in shelf.listed()] == ["known", "ready", "ready"]
        await shelf.close()

    asyncio.run(main())


def test_a_storm_of_alternating_models_starves_nobody() -> None:
    """Each client asks for models in turn, holds each a while, and some go while they wait."""
    served: Counter[str] = Counter()

    async def client(case: Case, number: int) -> None:
        rng = random.Random(number)
        for turn in range(20):
            name = "abc"[(number + turn) % 3]
            task = case.ask(name)
            if rng.random() < 0.2:
                for _ in range(rng.randrange(5)):
                    await asyncio.sleep(0)
                task.cancel()
            try:
                lease = await task
            except asyncio.CancelledError:
                continue
            assert lease.api.model.name == name
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            lease.release()
            served[name] += 1

    async def main(case: Case) -> None:
        await asyncio.gather(*(client(case, number) for number in range(32)))
        assert case.shelf.num_open == 0
        assert not any(model.waiters for model in case.shelf._models.values())

    loader = run(main, bound=5, a=2, b=2, c=3).loader
    assert loader.most <= 5
    assert set(served) == {"a", "b", "c"}
    assert sum(served.values()) > 400


def test_requests_of_a_loaded_model_can_not_hold_up_one_that_waits() -> None:
    """A model in constant use makes room, though at no moment it would be idle by itself."""

    async def main(case: Case) -> None:
        done = asyncio.Event()

        async def user() -> None:
            while not done.is_set():
                lease = await case.lease("a")
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                lease.release()

        users = [asyncio.create_task(user()) for _ in range(4)]
        await case.settled()
        for _ in range(5):
            (await case.lease("b")).release()
        done.set()
        await asyncio.gather(*users)

    run(main, bound=1)


def test_clients_who_wait_for_loads_take_turns() -> None:
    async def main(case: Case) -> None:
        case.loader.held.add("a")
        one, two, three = (Client(name) for name in ("one", "two", "three"))
        asked = [case.ask(name, one) for name in "abca"]
        await case.settled()
        asked += [case.ask("d", two), case.ask("e", two), case.ask("f", three)]
        await case.settled()
        assert case.loader.log == ["+a"]
        case.loader.let_go("a")
        for place in (0, 3, 4, 6, 1, 5, 2):
            (await asked[place]).release()

    log = run(main, bound=1, **dict.fromkeys("abcdef", 1)).loader.log
    assert [entry for entry in log if entry[0] == "+"] == ["+a", "+d", "+f", "+b", "+e", "+c"]


def test_clients_who_come_again_and_again_keep_no_other_out() -> None:
    async def main(case: Case) -> None:
        async def use(name: str, client: str) -> None:
            (await case.lease(name, client=Client(client))).release()

        case.loader.held.add("a")
        greedy = [asyncio.create_task(use(name, "greedy")) for name in "abc"]
        await case.settled()
        last = asyncio.create_task(use("d", "newcomer"))
        await case.settled()
        case.loader.let_go("a")
        for number in range(1, 9):  # each waits already when the last one's model is loaded
            following = asyncio.create_task(use("de"[number % 2], f"newcomer {number}"))
            await last
            last = following
        await asyncio.gather(*greedy, last)

    log = run(main, bound=1, **dict.fromkeys("abcde", 1)).loader.log
    loads = [entry for entry in log if entry[0] == "+"]
    assert loads[:2] == ["+a", "+d"]
    assert loads.index("+b") <= 4
    assert loads.index("+c") <= 6


def test_a_model_that_several_wait_for_comes_at_the_first_turn_of_them() -> None:
    async def main(case: Case) -> None:
        case.loader.held.add("a")
        one = [case.ask(name, Client("one")) for name in "abc"]
        await case.settled()
        two = case.ask("c", Client("two"))
        await case.settled()
        case.loader.let_go("a")
        for task in (one[0], two, one[2], one[1]):
            (await task).release()

    log = run(main, bound=1).loader.log
    assert [entry for entry in log if entry[0] == "+"] == ["+a", "+c", "+b"]
