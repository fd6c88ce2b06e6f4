"""Pulls by clients, with a scripted fetch: progress, sharing, turns, bounds, names, and the end of a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from realizar.errors import EngineUnavailableError, HubError, QueueFullError, RealizarError, UnknownModelError
from realizar.request import NO_CLIENT, Client
from realizar.server.app import create_app_of
from realizar.server.models.pulls import MOST_PULLS, PullEvent, Pulls, Report
from realizar.server.settings import ServerSettings
from server.models.shelf_case import Case, known, run


class ScriptedFetch:
    """Tells two events, and waits in between for names that are held. Attributes: log: begun, ended and left."""

    def __init__(self, *held: str) -> None:
        self.held, self.log = {name: asyncio.Event() for name in held}, list[str]()
        self.errors: dict[str, HubError] = {}

    async def __call__(self, name: str, report: Report) -> Path:
        self.log.append(f"+{name}")
        if name in self.errors:
            raise self.errors[name]
        report(PullEvent("pulling aa", "sha256:aa", 10, 4))
        try:
            if name in self.held:
                await self.held[name].wait()
        except asyncio.CancelledError:
            self.log.append(f"x{name}")
            raise
        report(PullEvent("pulling aa", "sha256:aa", 10, 10))
        self.log.append(f"-{name}")
        return Path("/models") / name


def pulling(case: Case, fetch: ScriptedFetch) -> Pulls:
    async def add(name: str, path: Path) -> None:
        assert path == Path("/models") / name
        if name == "user/torn":
            raise RealizarError("a header is torn")
        case.loader.sizes[name] = 1
        case.shelf.add(known(name, 1), 2)

    case.shelf.pulls = Pulls(fetch, add)
    return case.shelf.pulls


def client_of(case: Case) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app_of(case.shelf, ServerSettings()))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


async def pull(client: httpx.AsyncClient, name: str, **fields: Any) -> tuple[int, list[dict[str, Any]]]:
    response = await client.post("/api/pull", json={"model": name, **fields})
    return response.status_code, [json.loads(line) for line in response.text.splitlines()]


async def last(pulls: Pulls, name: str, client: Client = NO_CLIENT) -> PullEvent:
    return [event async for event in pulls.events(name, client)][-1]


def test_a_pulled_model_is_listed_and_answers() -> None:
    async def main(case: Case) -> None:
        fetch = ScriptedFetch()
        pulling(case, fetch)
        async with client_of(case) as client:
            status, lines = await pull(client, "hf.co/user/m:Q4_K_M")
            assert (status, lines[0], lines[-1]) == (200, {"status": "pulling manifest"}, {"status": "success"})
            whole = {"status": "pulling aa", "digest": "sha256:aa", "total": 10, "completed": 10}
            assert lines[1:-1] == [whole, {"status": "writing manifest"}]
            names = [model["name"] for model in (await client.get("/api/tags")).json()["models"]]
            assert names == ["a:latest", "b:latest", "c:latest", "user/m:Q4_K_M"]
            ids = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
            assert ids == ["a", "b", "c", "user/m:Q4_K_M"]
            for name in ("user/m:Q4_K_M", "hf.co/user/m:Q4_K_M"):
                answer = await client.post("/api/generate", json={"model": name, "prompt": "Hi", "stream": False})
                assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert await pull(client, "user/m:Q4_K_M", stream=False) == (200, [{"status": "success"}])
            assert await pull(client, "a:latest") == (200, [{"status": "success"}])
            assert fetch.log == ["+user/m:Q4_K_M", "-user/m:Q4_K_M"]  # what is there is not fetched again

    run(main)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../../../etc/passwd", "neither"),
        ("/etc/passwd", "neither"),
        ("user/m@../../../etc", "neither"),
        ("user/..", "neither"),
        ("user/m:../x.gguf", "neither"),
        ("--help", "neither"),
        ("llama3", "smollm2:135m"),
        ("user/m" * 4_000, "characters"),
        ("user/" + "m" * 300_000, "300005 characters"),
        ("user/m:" + "q" * 300_000, "300007 characters"),
        ("", "must be the name"),
        ("x\u0000y/z", "neither"),
    ],
)
def test_names_that_are_none_of_the_network(name: str, message: str) -> None:
    async def main(case: Case) -> None:
        fetch = ScriptedFetch()
        pulling(case, fetch)
        async with client_of(case) as client:
            status, lines = await pull(client, name)
            assert (status, fetch.log) == (400, [])
            assert message in lines[0]["error"]
            assert len(lines[0]["error"]) < 500

    run(main)


def test_without_the_option_it_is_named() -> None:
    async def main(case: Case) -> None:
        async with client_of(case) as client:
            status, lines = await pull(client, "user/m")
            assert (status, "--allow-pull" in lines[0]["error"]) == (400, True)

    run(main)


@pytest.mark.parametrize(
    ("name", "expected", "message"),
    [
        ("user/gone", 404, "no such repository"),
        ("user/far", 502, "can't be reached"),
        ("user/torn", 502, "header is torn"),
    ],
)
def test_a_failure_is_the_last_line_and_the_next_pull_begins_anew(name: str, expected: int, message: str) -> None:
    async def main(case: Case) -> None:
        fetch = ScriptedFetch()
        fetch.errors["user/gone"] = UnknownModelError("no such repository")
        fetch.errors["user/far"] = HubError("the hub can't be reached")
        pulling(case, fetch)
        async with client_of(case) as client:
            status, lines = await pull(client, name)
            assert (status, message in lines[-1]["error"]) == (200, True)
            status, lines = await pull(client, name, stream=False)
            assert (status, message in lines[-1]["error"]) == (expected, True)
            assert fetch.log.count(f"+{name}") == 2
            assert len((await client.get("/api/tags")).json()["models"]) == 3

    run(main)


async def leave(*clients: asyncio.Task[Any]) -> None:
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the test's own timeout ends it
        await asyncio.sleep(0)


def test_a_pull_ends_with_the_last_of_its_clients() -> None:
    async def main(case: Case) -> None:
        fetch = ScriptedFetch("user/m")
        pulls = pulling(case, fetch)
        first, second = (asyncio.create_task(last(pulls, "user/m")) for _ in range(2))
        await until(lambda: fetch.log == ["+user/m"])
        await leave(first)
        await case.settled()
        assert fetch.log == ["+user/m"]
        await leave(second)
        await until(lambda: fetch.log == ["+user/m", "xuser/m"])
        fetch.held["user/m"].set()
        assert await last(pulls, "user/m") == PullEvent("writing manifest")
        assert fetch.log[2:] == ["+user/m", "-user/m"]

    run(main)


def test_pulls_take_turns_and_only_some_wait() -> None:
    async def main(case: Case) -> None:
        fetch = ScriptedFetch("user/0")
        pulls = pulling(case, fetch)
        names = [f"user/{number}" for number in range(MOST_PULLS)]
        waiting = [asyncio.create_task(last(pulls, name)) for name in names]
        await until(lambda: fetch.log == ["+user/0"])
        await case.settled()
        assert fetch.log == ["+user/0"]
        with pytest.raises(QueueFullError):
            await last(pulls, "user/one-more")
        await leave(waiting.pop(1))  # one that waits makes room
        waiting.append(asyncio.create_task(last(pulls, "user/one-more")))
        await case.settled()
        fetch.held["user/0"].set()
        assert await asyncio.gather(*waiting) == [PullEvent("writing manifest")] * MOST_PULLS
        names = ["user/0", *names[2:], "user/one-more"]
        assert fetch.log == [f"{sign}{name}" for name in names for sign in "+-"]

    run(main)


def test_clients_share_the_places_and_take_turns() -> None:
    """One that has them all keeps no other out, and waits for a turn of the other's after each of its own."""

    async def main(case: Case) -> None:
        fetch = ScriptedFetch("many/0")
        pulls = pulling(case, fetch)
        many, few = Client("many"), Client("few")
        waiting = [asyncio.create_task(last(pulls, f"many/{number}", many)) for number in range(MOST_PULLS)]
        await until(lambda: fetch.log == ["+many/0"])
        waiting += [asyncio.create_task(last(pulls, f"few/{number}", few)) for number in range(2)]
        await case.settled()
        with pytest.raises(QueueFullError):
            await last(pulls, "many/more", many)
        await leave(waiting.pop(1))
        fetch.held["many/0"].set()
        await asyncio.gather(*waiting)
        begun = [each[1:] for each in fetch.log if each.startswith("+")]
        assert begun[:5] == ["many/0", "few/0", "many/2", "few/1", "many/3"]

    run(main)


def test_a_server_that_ends_gives_pulls_up() -> None:
    async def main(case: Case) -> None:
        fetch = ScriptedFetch("user/m")
        pulls = pulling(case, fetch)
        waiting = asyncio.create_task(last(pulls, "user/m"))
        await until(lambda: fetch.log == ["+user/m"])
        await case.shelf.drain()
        assert fetch.log == ["+user/m", "xuser/m"]
        for late in (waiting, asyncio.create_task(last(pulls, "user/n"))):
            with pytest.raises(EngineUnavailableError):
                await late

    run(main)
