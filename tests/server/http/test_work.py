"""Computing for clients: in turns, by size, and only while somebody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from realizar.server.http.work import LARGE_BYTES, Stop, WorkCancelledError, WorkPool
from waits import HANG_S


def with_pool(main: Callable[[WorkPool], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(WorkPool()), HANG_S))


class Held:
    """Work that goes on until it is stopped."""

    def __init__(self) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self, stop: Stop) -> str:
        self.began.set()
        assert self.go_on.wait(HANG_S)
        stop.check()
        return "done"


def test_small_work_waits_for_no_large_work() -> None:
    async def main(pool: WorkPool) -> None:
        held = Held()
        large = [asyncio.ensure_future(pool.run("a", LARGE_BYTES + 1, held)) for _ in range(20)]
        assert await asyncio.to_thread(held.began.wait, 60)
        assert await pool.run("b", 10, lambda _: "b") == "b"
        assert await pool.run("a", 10, lambda _: "the same client's") == "the same client's"
        held.go_on.set()
        assert await asyncio.gather(*large) == ["done"] * 20

    with_pool(main)


def test_clients_take_turns() -> None:
    order: list[str] = []

    async def main(pool: WorkPool) -> None:
        held = Held()
        first = asyncio.ensure_future(pool.run("a", LARGE_BYTES + 1, held))
        assert await asyncio.to_thread(held.began.wait, 60)
        names = ["a1", "a2", "a3", "b1", "c1", "c2"]
        waiting = [
            asyncio.ensure_future(pool.run(name[0], LARGE_BYTES + 1, lambda _, name=name: order.append(name)))
            for name in names
        ]
        await asyncio.sleep(0)
        held.go_on.set()
        await asyncio.gather(first, *waiting)

    with_pool(main)
    assert order == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_work_that_nobody_waits_for_is_not_begun_or_is_stopped() -> None:
    begun: list[str] = []

    async def main(pool: WorkPool) -> None:
        held = Held()
        stopped = threading.Event()

        def until_stopped(stop: Stop) -> None:
            try:
                held(stop)
            except WorkCancelledError:
                stopped.set()
                raise

        first = asyncio.ensure_future(pool.run("a", LARGE_BYTES + 1, until_stopped))
        assert await asyncio.to_thread(held.began.wait, 60)
        second = asyncio.ensure_future(pool.run("a", LARGE_BYTES + 1, lambda _: begun.append("second")))
        third = asyncio.ensure_future(pool.run("b", LARGE_BYTES + 1, lambda _: begun.append("third")))
        await asyncio.sleep(0)
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert begun == []  # the thread is taken until the first has ended
        held.go_on.set()
        await third
        assert stopped.is_set()

    with_pool(main)
    assert begun == ["third"]


def test_errors_come_back() -> None:
    async def main(pool: WorkPool) -> None:
        def fail(_: Stop) -> None:
            raise KeyError("x")

        for size in (1, LARGE_BYTES + 1):
            for _ in range(5):  # a thread is free again each time
                with pytest.raises(KeyError):
                    await pool.run("a", size, fail)

    with_pool(main)
