"""Large requests share a bounded memory, and none of them is parsed or tokenized beyond a bound."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import ChoiceDelta, RequestOutput, Timings
from realizar.errors import ContextLengthError
from realizar.request import Client
from realizar.server.api import make_api
from realizar.server.errors import ApiError
from realizar.server.generation.prompts import MAX_TOKENS, check_fits, tokenize_prompts
from realizar.server.generation.run import deltas_of
from realizar.server.http.body_json import MAX_KEYS, MAX_VALUES, parse_json, parsed_size
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request_memory import FREE_BYTES, RequestLease, RequestMemory
from realizar.server.http.work import Stop
from realizar.server.metrics import Metrics
from realizar.server.openai.routes import MAX_BYTES
from realizar.server.settings import ServerSettings
from server.http.http_door import SETTINGS, Door, at_the_door
from server.scripted_engine import ByteTokenizer, ScriptedChoice, ScriptedEngine, scripted_model
from waits import HANG_S

HEAD = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{}\r\n"


def post(path: str, body: bytes, *headers: str) -> bytes:
    return HEAD.format(path, len(body), "".join(header + "\r\n" for header in headers)).encode() + body


def test_images_have_an_account_of_their_own() -> None:
    memory, images = RequestMemory(100 * FREE_BYTES), RequestMemory(1000 * FREE_BYTES, "--image-memory", "the images")
    first, second = (RequestLease(memory, Client("a"), images) for _ in range(2))
    first.hold(50 * FREE_BYTES)
    first.hold_images(400 * FREE_BYTES)
    with pytest.raises(
        ApiError, match=r"^the images take 19200 KiB; at most 16000 KiB are allowed \(--image-memory\)$"
    ):
        first.hold_images(200 * FREE_BYTES)
    with pytest.raises(ApiError, match=r"share \(--image-memory\)"):
        second.hold_images(400 * FREE_BYTES)
    first.release()
    second.hold_images(500 * FREE_BYTES)
    second.hold(50 * FREE_BYTES)


def test_a_client_gets_half_and_others_the_rest() -> None:
    memory = RequestMemory(1000 * FREE_BYTES)
    size = 250 * FREE_BYTES
    first, second, third = (RequestLease(memory, Client("a")) for _ in range(3))
    first.hold(size)
    second.hold(size)
    with pytest.raises(ApiError) as refused:
        third.hold(size)
    assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "1")
    third.hold(FREE_BYTES)  # small ones always pass
    RequestLease(memory, Client("b")).hold(size)
    first.hold(size // 2)  # holds more already
    first.release()
    first.release()
    third.hold(size // 2)
    with pytest.raises(ApiError) as refused:
        RequestLease(memory, Client("c")).hold(501 * FREE_BYTES)
    assert refused.value.status == 413


def test_an_answer_that_runs_is_not_ended_for_what_others_hold() -> None:
    """Its log-probabilities count, so that new requests are refused; it alone may not hold more than a share."""
    memory = RequestMemory(1000 * FREE_BYTES)
    running, other, new = (RequestLease(memory, Client("a")) for _ in range(3))
    running.begin_logprobs()
    other.hold(480 * FREE_BYTES)

    async def main() -> list[ChoiceDelta]:
        stream = AsyncStream("x", lambda: None)
        entries = (None,) * (100 * FREE_BYTES // 500)
        choice = ScriptedChoice(stream)
        for text in "abc":
            choice.gain(text, logprobs=cast("Any", entries))
        stream.end(RequestOutput("x", None, (65,), (), Timings(0.0, 0.1, 0.2, 0.3)))
        return [delta async for delta in deltas_of(stream, Metrics("m"), running, 0)]

    assert "".join(delta.text for delta in asyncio.run(main())) == "abc"
    for refused_call in (new.begin_logprobs, lambda: RequestLease(memory, Client("b")).hold(200 * FREE_BYTES)):
        with pytest.raises(ApiError) as refused:
            refused_call()
        assert refused.value.status == 429
    with pytest.raises(ApiError) as refused:
        running.add_logprobs(210 * FREE_BYTES // 500, 0)
    assert refused.value.status == 413
    running.release()
    new.begin_logprobs()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
    ],
)
def test_log_probabilities_above_the_share_are_refused_before_they_run(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, take = [0], RequestMemory.take

    def noting(memory: RequestMemory, client: str, num_bytes: int, held_bytes: int = 0, **options: Any) -> None:
        take(memory, client, num_bytes, held_bytes, **options)
        held.append(held_bytes + num_bytes)

    monkeypatch.setattr(RequestMemory, "take", noting)
    settings = replace(SETTINGS, request_memory_bytes=1 << 20, body_timeout_s=600.0)

    async def main(door: Door) -> None:
        _, writer = await door.connect()
        writer.write(post("/v1/completions", b'{"prompt": "' + b"x" * 515_000)[:-10])
        await writer.drain()
        while held[-1] < 515_000:  # noqa: ASYNC110 - the server takes the body in
            await asyncio.sleep(0.001)
        answer = await door.exchange(post(path, json.dumps(fields).encode(), "connection: close"))
        assert answer.startswith(b"HTTP/1.1 429"), answer
        assert b"too_much_in_flight" in answer
        assert door.app.state.models.api.engine.num_asked == 0

    at_the_door(main, settings)


async def _cancel(tasks: list[asyncio.Task[bytes]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_bodies_that_are_still_coming_count() -> None:
    """Many that are almost whole: those above the share are refused, others' small requests pass, and it ends."""
    settings = replace(SETTINGS, request_memory_bytes=4 << 20, body_timeout_s=600.0)

    async def main(door: Door) -> None:
        body = b'{"prompt": "' + b"x" * 600_000
        begun = []
        for _ in range(3):
            reader, writer = await door.connect()
            writer.write(post("/v1/completions", body + b"x" * 10)[:-10])
            await writer.drain()
            begun.append((reader, writer))
        # The server takes them in while this asks, so the one that is refused may be one of them.
        refusals = [asyncio.create_task(reader.readuntil(b"too_much_in_flight")) for reader, _ in begun]
        refused: list[bytes] = []
        while not refused:
            answer = await door.exchange(post("/v1/completions", body + b'"}', "connection: close"))
            refused = [task.result() for task in refusals if task.done()] + [answer] * (b" 429 " in answer[:20])
        assert b" 429 " in refused[0][:20]
        assert b"retry-after: 1" in refused[0]
        assert b"too_much_in_flight" in refused[0]
        await _cancel(refusals)
        small = await door.exchange(post("/v1/completions", b'{"prompt": "x"}', "connection: close"))
        assert small.startswith(b"HTTP/1.1 200")
        for _, writer in begun:
            writer.transport.abort()
        answer = b""
        while not answer.startswith(b"HTTP/1.1 200"):
            answer = await door.exchange(post("/v1/completions", body[:90_000] + b'"}', "connection: close"))

    at_the_door(main, settings)


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b",".join(b'"%x":1' % key for key in range(MAX_KEYS + 2)) + b"}",
        b"{" + b",".join(b'"%x\\\\" \t:1' % key for key in range(MAX_KEYS + 2)) + b"}",
        b"[" + b"1," * (MAX_VALUES + 1) + b"1]",
        b'{"a":[' + b"[]," * 66_000 + b"[]]}",
    ],
    ids=["keys", "keys with spaces and backslashes", "values", "lists"],
)
def test_what_a_body_may_hold(body: bytes) -> None:
    with pytest.raises(ApiError, match="it has too many values"):
        parse_json(body)


def test_colons_in_texts_are_no_keys() -> None:
    text = r"\": " * 150_000 + r"\\"
    assert parse_json(b'{"a": "%s", "b" : 1}' % text.encode())["b"] == 1


@pytest.mark.parametrize("body", [b'{"a": "%s"}' % ("x" * 1000 + "\U0001f600").encode(), b"[" + b"1000," * 999 + b"1]"])
def test_the_size_of_what_is_parsed_is_bounded_from_above(body: bytes) -> None:
    value: Any = parse_json(body)
    items = [*value.values()] if isinstance(value, dict) else [value, *value]
    assert parsed_size(body) + 200 > sum(sys.getsizeof(item) for item in items)


class Watched(ByteTokenizer):
    """Remembers how long the texts were that it took apart."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sizes: list[int] = []

    def _encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        self.sizes.append(len(text))
        return super()._encode(text, *args, **options)


def test_refusing_a_long_text_costs_what_the_context_is() -> None:
    tokenizer = Watched()
    with pytest.raises(ContextLengthError, match="has 100000 characters, so the prompt is too long"):
        check_fits("x" * 100_000, tokenizer, 100, "prompt")
    assert tokenizer.sizes == []
    with pytest.raises(ContextLengthError, match="more than 264 tokens"):
        check_fits("x" * 10_000, tokenizer, 100, "prompt")
    assert tokenizer.sizes == [264]
    check_fits("x" * 100, tokenizer, 100, "prompt")


def test_prompts_have_a_bound_together() -> None:
    api = make_api(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings())
    given = ["x" * 100_000] * 7
    assert len(tokenize_prompts(given[:5], api, Stop(), param="input")) == 5
    with pytest.raises(ApiError, match=f"input has more than {MAX_TOKENS} tokens"):
        tokenize_prompts(given, api, Stop(), param="input")


def test_a_text_to_count_has_a_bound_of_its_own() -> None:
    async def main(door: Door) -> None:
        most = max(MAX_BYTES, 8 * door.app.state.models.api.max_model_len)
        large = json.dumps({"prompt": "\u00e9" * (most // 2 + 1)}, ensure_ascii=False).encode()
        answer = await door.exchange(post("/tokenize", large, "connection: close"))
        assert b"string_too_long" in answer

    at_the_door(main)


def test_a_disconnect_frees_the_text() -> None:
    """Two requests wait for their turn; the one whose client has left is not tokenized."""
    seen: list[int] = []
    hold, held = threading.Event(), threading.Event()

    async def main(door: Door) -> None:
        tokenizer = door.app.state.models.api.model.tokenizer
        encode = tokenizer._encode

        def slow(text: str, *args: Any, **options: Any) -> list[int]:
            if len(text) > 60_000:
                seen.append(len(text))
                held.set()
                assert hold.wait(HANG_S)
            return cast("list[int]", encode(text, *args, **options))

        tokenizer._encode = slow
        texts = [post("/tokenize", json.dumps({"prompt": "x" * size}).encode()) for size in (70_000, 80_000, 90_000)]
        writers = []
        for text in texts:
            reader, writer = await door.connect()
            writer.write(text)
            await writer.drain()
            writers.append((reader, writer))
            await asyncio.to_thread(held.wait, 60)
        short = await door.exchange(post("/tokenize", b'{"prompt": "short"}', "connection: close"))
        assert b'"count":5' in short
        work = door.app.state.work
        while sum(map(len, work._large._waiting.values())) < 2:  # noqa: ASYNC110 - the pool has no event for it
            await asyncio.sleep(0.001)
        writers[1][1].close()
        while sum(map(len, work._large._waiting.values())) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        hold.set()
        assert b"200" in await writers[2][0].readline()

    at_the_door(main)
    assert seen == [70_000, 90_000]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_held_too(stream: bool) -> None:
    """A prompt's are many: with twenty others each, some thousand times the bytes of its tokens."""

    async def main(door: Door) -> None:
        for path, prompt, status in (
            ("/v1/completions", {"prompt": ["x" * 900] * 10, "echo": True, "logprobs": 5, "max_tokens": 1}, 413),
            ("/v1/completions", {"prompt": ["x" * 900], "echo": True, "logprobs": 5, "max_tokens": 1}, 200),
            ("/v1/completions", {"prompt": ["x" * 900] * 10, "prompt_logprobs": 20, "max_tokens": 0}, 413),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "x" * 9000}], "prompt_logprobs": 9},
                413,
            ),
        ):
            if stream and "prompt_logprobs" in prompt:
                continue
            body = json.dumps({**prompt, "stream": stream}).encode()
            answer = await door.exchange(post(path, body, "connection: close"))
            if status == 413:
                assert b"--request-memory" in answer, answer
                assert answer.startswith(b"HTTP/1.1 413")
            else:
                assert b"--request-memory" not in answer

    at_the_door(main, replace(SETTINGS, request_memory_bytes=8 << 20))


def test_a_refused_request_is_let_go_at_once() -> None:
    """Frames that an error's traceback holds would keep the text until the next collection of garbage."""

    class Text:
        """A body that can be watched."""

    alive = weakref.WeakSet[Text]()

    async def main(door: Door) -> None:
        work = door.app.state.work

        def refuse(text: Text) -> None:
            del text
            raise ApiError(400, "no")

        def make() -> Callable[[Stop], None]:
            text = Text()
            alive.add(text)
            return lambda _: refuse(text)

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            return {}

        for size in (1, 1 << 20):
            with pytest.raises(ApiError):
                await unless_disconnected(receive, work.run("a", size, make()))
        while alive:  # noqa: ASYNC110 - the thread lets go last; without that, for ever
            await asyncio.sleep(0.001)

    gc.disable()
    try:
        at_the_door(main)
    finally:
        gc.enable()
