"""One run against one server: hostile clients by a seed, healthy streams beside them, and what must hold after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import httpx

from fuzz import healthy
from fuzz.bodies import make_request
from fuzz.check_answers import OVERLOAD, answer_fault
from fuzz.hostile_connections import attack
from fuzz.report import Report
from fuzz.server import HEALTHY_KEY, HOSTILE_KEYS, FuzzedServer, figures

_ANSWER_S = 300.0  # a guard against hangs; any machine answers within it
_IDLE_S = 300.0
_AUDIT_S = 3.0  # an idle engine audits its blocks after one second
_MOST_MEMORY_MB = 400.0
_LEAVES, _ATTACKS, _WRONG_KEYS = 0.1, 0.05, 0.03
_MOST_IDLE_FILES = 40  # without clients none holds more than 21


@dataclass(frozen=True, slots=True)
class Extent:
    """The extent of a run: requests `first` to `first + count`, until `seconds` are over."""

    seed: int
    seconds: float
    first: int = 0
    count: int | None = None
    clients: int = 12


class Run:
    """Sends, compares and counts. One run for one server."""

    def __init__(self, server: FuzzedServer, extent: Extent, vocab_size: int, report: Report) -> None:
        self._server, self._extent, self._vocab_size, self._report = server, extent, vocab_size, report
        self._until_s = time.monotonic() + extent.seconds
        self._indexes = self._next_index()
        self._models: tuple[str, ...] = ()

    async def run(self) -> None:
        """Run the whole test; faults are in the report."""
        async with self._client({"Authorization": f"Bearer {HEALTHY_KEY}"}) as client:
            self._models = tuple(each["id"] for each in (await client.get("/v1/models")).json()["data"])
            alone = await healthy.texts_alone(client, self._models[0], self._report)
            stop = asyncio.Event()
            streams = [
                asyncio.create_task(healthy.repeat(client, self._models[0], kind, alone[kind], stop, self._report))
                for kind in healthy.KINDS
            ]
            await asyncio.gather(*(self._hostile_client() for _ in range(self._extent.clients)))
            stop.set()
            await asyncio.gather(*streams)
            await self._check_idle(client)
            for kind in healthy.KINDS:
                await healthy.compare(client, self._models[0], kind, alone[kind], self._report)
            await asyncio.sleep(_AUDIT_S)
        self._check_process()

    def _next_index(self) -> Iterator[int]:
        index = self._extent.first
        while time.monotonic() < self._until_s:
            if self._extent.count is not None and index >= self._extent.first + self._extent.count:
                return
            yield index
            index += 1

    def _client(self, headers: dict[str, str] | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._server.url, headers=headers, timeout=_ANSWER_S)

    async def _hostile_client(self) -> None:
        async with self._client() as client:
            for index in self._indexes:
                if self._server.process.poll() is not None:
                    self._report.fault(f"{self._named(index)}: the server has ended")
                    return
                try:
                    await self._send(client, index)
                except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on and names the request
                    self._report.fault(f"{self._named(index)}: {type(error).__name__}: {error}")

    def _named(self, index: int) -> str:
        return f"--seed {self._extent.seed} --first {index} --count 1"

    async def _send(self, client: httpx.AsyncClient, index: int) -> None:
        rng = Random(f"{self._extent.seed}/{index}")
        kind = rng.random()
        if kind < _ATTACKS:
            for status in await attack(rng, self._server.port, rng.choice(HOSTILE_KEYS)):
                self._count(index, status, None)
        elif kind < _ATTACKS + _LEAVES:
            await self._leave(client, rng)
        else:
            await self._ask(client, index, rng)

    async def _ask(self, client: httpx.AsyncClient, index: int, rng: Random) -> None:
        path, body = make_request(rng, self._vocab_size, self._models)
        headers, opens = _keyed(rng)
        response = await client.post(path, content=body, headers=headers)
        content_type = response.headers.get("content-type", "")
        fault = answer_fault(path, response.status_code, content_type, response.content)
        if not opens and response.status_code != 401:
            fault = f"status {response.status_code} without a valid key"
        self._count(index, response.status_code, fault and f"{path}: {fault}")

    async def _leave(self, client: httpx.AsyncClient, rng: Random) -> None:
        """A client that hangs up before its answer is whole."""
        path, body = make_request(rng, self._vocab_size, self._models)
        try:
            async with asyncio.timeout(rng.choice((0.0, 0.01, 0.1, 0.5))):
                await client.post(path, content=body, headers=_keyed(rng)[0])
        except (TimeoutError, httpx.HTTPError):
            pass
        self._report.counts["clients that left"] += 1

    def _count(self, index: int, status: int, fault: str | None) -> None:
        self._report.counts[f"answers {status}"] += 1
        if fault is None and status >= 500 and status not in OVERLOAD:
            fault = f"status {status}"
        if fault is not None:
            self._report.fault(f"{self._named(index)}: {fault}")

    async def _check_idle(self, client: httpx.AsyncClient) -> None:
        """Nothing may be left open once every client is gone."""
        deadline_s = time.monotonic() + _IDLE_S
        while True:
            now = await figures(client)
            left = {name: now.get(name, 0.0) for name in ("num_requests_running", "num_requests_waiting")}
            left["kv_cache_usage_perc"] = now.get("kv_cache_usage_perc", 0.0)
            if not any(left.values()):
                break
            if time.monotonic() > deadline_s:
                self._report.fault(f"clients are gone, and the engine holds {left}")
                return
            await asyncio.sleep(0.1)
        if restarts := now.get("engine_restarts_total", 0.0):
            self._report.fault(f"the engine died {restarts:.0f} times")

    def _check_process(self) -> None:
        for line in self._server.grave_lines()[:5]:
            self._report.fault(f"the server's log says: {line}")
        if (peak := self._server.peak_mb()) > _MOST_MEMORY_MB:
            self._report.fault(f"the API process held {peak:.0f} MB; at most {_MOST_MEMORY_MB:.0f} are allowed")
        if (left := self._server.most_open_files()) > _MOST_IDLE_FILES:
            self._report.fault(f"an idle API process holds {left} open files; at most {_MOST_IDLE_FILES} are allowed")
        print(f"the API process held {peak:.0f} MB at most", flush=True)
        if (status := self._server.stop()) != 0:
            self._report.fault(f"the server ended with status {status}")


def _keyed(rng: Random) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Headers of a request with one of the hostile keys, or rarely with none that opens; True if it opens."""
    key = rng.choice(HOSTILE_KEYS).encode()
    name, scheme = rng.choice(((b"authorization", b"Bearer "), (b"x-api-key", b"")))
    headers = [(b"content-type", b"application/json")]
    if rng.random() > _WRONG_KEYS:
        return [*headers, (name, scheme + key)], True
    wrong = (b"x", key[:-1], key.upper(), key + b"\xff", key + b" " + key, HEALTHY_KEY[1:].encode(), b"k" * 9000)
    return [*headers, *((name, scheme + each) for each in rng.sample(wrong, rng.choice((0, 1))))], False
