"""A scripted server for the chat page and for bench-serve: it answers delta by delta, with known pauses."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from waits import HANG_S


@dataclass(frozen=True)
class Delta:
    """A delta of a choice in OpenAI's format, the seconds to wait before it, and an event that it waits for."""

    delta: dict[str, Any]
    wait_s: float = 0.0
    after: threading.Event | None = None
    index: int = 0


@dataclass(frozen=True)
class Script:
    """An answer. `status` other than 200 refuses; `error` breaks the stream off; `whole` says whether it ends well.

    `drafts` are those that were verified, and right, as `timings` has them; None without any.
    """

    deltas: Sequence[Delta] = ()
    finish_reason: str = "stop"
    status: int = 200
    error: str | None = None
    whole: bool = True
    drafts: tuple[int, int] | None = None


@dataclass
class Span:
    """Times of an answer's start, of each delta and of all but its end; seconds of `time.perf_counter`."""

    begun_s: float
    deltas_s: list[float] = field(default_factory=list)
    ended_s: float | None = None


def words(text: str, wait_s: float = 0.0, first_s: float | None = None) -> Script:
    """A text in deltas of a few characters, each after a pause."""
    deltas = [text[i : i + 4] for i in range(0, len(text), 4)]
    waits = [wait_s if first_s is None else first_s, *[wait_s] * len(deltas)]
    return Script([Delta({"content": each}, wait) for each, wait in zip(deltas, waits, strict=False)])


def held(text: str, rest: str = "", after: threading.Event | None = None) -> Script:
    """A text at once, and a rest that waits for an event; without one the answer does not end by itself."""
    event = after or threading.Event()
    return Script([*words(text).deltas, *(replace(each, after=event) for each in words(rest or "never").deltas)])


async def start_serving(server: uvicorn.Server, listener: socket.socket) -> asyncio.Task[None]:
    """Serve on a socket that listens, in a task that goes on until `cut_off` or the server's own end."""
    serving = asyncio.create_task(server._serve([listener]))
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.001)
    return serving


async def cut_off(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    """End, and break off what is open. uvicorn looks every tenth of a second whether it shall, and waits for another.

    Nothing happens to one that has ended.
    """
    serving.cancel()
    await asyncio.wait({serving})
    for each in server.servers:
        each.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()


@dataclass
class ScriptedApi:
    """Answers chats and completions by `script`, and remembers what it was asked.

    Attributes:
        script: an answer for a request's body.
        key: that it wants, if any.
        owner: of the model, by which bench-serve knows a server's program.
        routes: served besides the API.
        more: names and states of further models.
        largest_image: of the first model, as `/v1/models` has it; None where it reads text only.
        left: requests whose client went away before the end.
        spans: times of each answer, in the order of their beginnings.
    """

    script: Callable[[dict[str, Any]], Script] = lambda body: words("Hello")
    key: str | None = None
    owner: str = "realizar"
    routes: Sequence[BaseRoute] = ()
    more: Sequence[tuple[str, str]] = ()
    largest_image: dict[str, int | None] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    left: int = 0
    url: str = ""

    def __enter__(self) -> Self:
        routes = [
            Route("/v1/models", self._models),
            Route("/ready", self._ready),
            Route("/health", self._ready),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
            Route("/v1/completions", self._answer, methods=["POST"]),
            *self.routes,
        ]
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_config=None, ws="none", lifespan="off")
        begun = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config, listener, begun), daemon=True)
        self._thread.start()
        assert begun.wait(HANG_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(HANG_S)

    def _run(self, config: uvicorn.Config, listener: socket.socket, begun: threading.Event) -> None:
        async def serve() -> None:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
            server = uvicorn.Server(config)
            serving = await start_serving(server, listener)
            begun.set()
            await self._ended.wait()
            await cut_off(server, serving)

        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(serve())

    def _refusal(self, request: Request) -> Response | None:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "a key is needed")
        return None

    async def _models(self, request: Request) -> Response:
        sampling = {"temperature": 0.7, "top_k": 0, "min_p": 0.05, "max_tokens": None, "stop": []}
        record = {"id": "scripted-1b", "object": "model", "max_model_len": 4096, "default_sampling": sampling}
        record["owned_by"] = self.owner
        others = [{**record, "id": name, "state": state, "max_model_len": 100} for name, state in self.more]
        first = record if self.largest_image is None else {**record, "largest_image": self.largest_image}
        return self._refusal(request) or JSONResponse({"object": "list", "data": [first, *others]})

    async def _ready(self, request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def _answer(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        body = json.loads(await request.body())
        self.requests.append(body)
        script = self.script(body)
        if script.status != 200:
            return _error(script.status, script.error or "refused")
        chat = request.url.path.endswith("chat/completions")
        return StreamingResponse(self._chunks(script, body, chat=chat), media_type="text/event-stream")

    async def _chunks(self, script: Script, body: dict[str, Any], *, chat: bool) -> AsyncIterator[str]:
        self.spans.append(span := Span(time.perf_counter()))
        base = {"id": "x", "created": 1, "model": "scripted-1b"}
        done = False
        try:
            for each in script.deltas:
                await asyncio.sleep(each.wait_s)
                while each.after is not None and not each.after.is_set():  # noqa: ASYNC110 - it is another thread's
                    await asyncio.sleep(0.01)
                span.deltas_s.append(time.perf_counter())
                delta = {"delta": each.delta} if chat else {"text": each.delta["content"]}
                yield _event({**base, "choices": [{"index": each.index, "finish_reason": None, **delta}]})
            if script.error is not None:
                yield _event({"error": {"message": script.error, "type": "server_error", "param": None, "code": None}})
            elif script.whole:
                end: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
                yield _event({**base, "choices": [{"index": 0, "finish_reason": script.finish_reason, **end}]})
                if body.get("stream_options", {}).get("include_usage"):
                    count = len(script.deltas)
                    usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
                    drafted = dict(zip(("draft_n", "draft_n_accepted"), script.drafts or (), strict=False))
                    timings = {"timings": drafted} if drafted else {}
                    yield _event({**base, "choices": [], "usage": usage, **timings})
                span.ended_s = time.perf_counter()
                yield "data: [DONE]\n\n"
            done = True
        finally:
            span.ended_s = span.ended_s or time.perf_counter()
            self.left += not done


def _event(value: dict[str, Any]) -> str:
    return f": a comment\n\ndata: {json.dumps(value, ensure_ascii=False)}\n\n"


def _error(status: int, message: str) -> Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}
    return JSONResponse(body, status, headers={"retry-after": "3"} if status == 429 else None)
