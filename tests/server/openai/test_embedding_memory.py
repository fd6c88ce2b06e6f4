"""An answer of many vectors is bounded in memory, and written off the event loop."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from realizar.engine.frontend.async_stream import Embedding
from realizar.request import Client
from realizar.server.generation import embedding
from realizar.server.generation.embedding import unit_vector
from realizar.server.http.request_memory import _BYTES_PER_BASE64_VALUE, _BYTES_PER_VALUE
from realizar.server.http.work import Stop
from realizar.server.openai import routes
from realizar.server.openai.routes import _vector_data
from server.http.http_door import SETTINGS, Door, at_the_door
from server.scripted_engine import ScriptedEngine, ScriptedInfo

WIDTH = 4096
EMBEDDING = replace(SETTINGS, embeddings="last")


def wide(monkeypatch: pytest.MonkeyPatch, hold: asyncio.Event | None = None) -> None:
    """Vectors of WIDTH values; the first few are not given before `hold`."""

    async def embed(
        self: ScriptedEngine, token_ids: list[int], pooling: str, *, request_id: str, client: Client
    ) -> Embedding:
        self.num_asked += 1
        if hold is not None and self.num_asked <= ScriptedInfo.max_running:
            await hold.wait()
        return Embedding((3.0, 4.0, *(0.0,) * (WIDTH - 2)), len(token_ids), 0)

    monkeypatch.setattr(ScriptedEngine, "info", ScriptedInfo(hidden_size=WIDTH))
    monkeypatch.setattr(ScriptedEngine, "embed", embed)


def asked(num_prompts: int, **fields: Any) -> bytes:
    body = json.dumps({"model": "scripted", "input": ["a"] * num_prompts, **fields}).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_large_answer_is_written_off_the_loop(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    threads: set[str] = set()

    def data(index: int, unit: Any, *, as_base64: bool) -> bytes:
        threads.add(threading.current_thread().name)
        return honest(index, unit, as_base64=as_base64)

    honest = routes._vector_data
    monkeypatch.setattr(routes, "_vector_data", data)
    wide(monkeypatch)

    async def main(door: Door) -> None:
        answer = await door.exchange(asked(20, encoding_format=encoding))
        assert answer.startswith(b"HTTP/1.1 200")
        found = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert [each["index"] for each in found["data"]] == list(range(20))
        assert found["usage"]["prompt_tokens"] == 20
        vector = found["data"][19]["embedding"]
        values = np.frombuffer(base64.b64decode(vector), "<f4") if encoding == "base64" else np.array(vector)
        assert values[:3] == pytest.approx([0.6, 0.8, 0.0])

    at_the_door(main, EMBEDDING)
    assert all(name.startswith("large-work") for name in threads), threads
    assert threads


def test_vectors_are_held_until_they_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(door: Door) -> None:
        hold = asyncio.Event()
        wide(monkeypatch, hold)
        engine = door.app.state.models.api.engine
        first = asyncio.ensure_future(door.exchange(asked(100)))  # 12.5 of the client's 16 MiB
        while engine.num_asked < ScriptedInfo.max_running:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
        second = await door.exchange(asked(100))
        assert second.startswith(b"HTTP/1.1 429")
        assert b"too_much_in_flight" in second
        assert b"--request-memory" in second
        huge = await door.exchange(asked(200))
        assert huge.startswith(b"HTTP/1.1 413")
        assert b"--request-memory" in huge
        assert b"request_too_large" in huge
        hold.set()
        assert (await first).startswith(b"HTTP/1.1 200")
        while not (await door.exchange(asked(100))).startswith(b"HTTP/1.1 200"):  # it is given back after the answer
            pass

    at_the_door(main, replace(EMBEDDING, request_memory_bytes=32 << 20))


def test_usual_batches_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 vectors of 1,024 numbers are 64 of 4,096."""
    wide(monkeypatch)

    async def main(door: Door) -> None:
        for _ in range(2):
            assert (await door.exchange(asked(64))).startswith(b"HTTP/1.1 200")

    at_the_door(main, EMBEDDING)
    assert EMBEDDING.request_memory_bytes // 4 > 256 * 1024 * _BYTES_PER_VALUE


@pytest.mark.parametrize(
    ("as_base64", "most"), [(False, _BYTES_PER_VALUE), (True, _BYTES_PER_BASE64_VALUE)], ids=["float", "base64"]
)
def test_what_a_value_takes(monkeypatch: pytest.MonkeyPatch, as_base64: bool, most: int) -> None:
    """Numbers as long as they get, and more of them than one vector's, which is there as Python's numbers too."""
    values = tuple(np.random.default_rng(0).standard_normal(1024).tolist())

    async def compute(request: Any, function: Callable[[Stop], Any], size_bytes: int) -> Any:
        return function(Stop())

    monkeypatch.setattr(embedding, "compute", compute)
    tracemalloc.start()
    try:
        units = [unit_vector(values) for _ in range(256)]
        write = functools.partial(_vector_data, as_base64=as_base64)
        body = asyncio.run(embedding.vectors_answer(cast("Any", None), b'{"data":[', units, b"]}", write)).body
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most * 256 * 1024
    assert len(msgspec.json.decode(body)["data"]) == 256
