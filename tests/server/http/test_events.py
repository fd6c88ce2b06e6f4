"""Events from templates have the bytes of events from records."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, cast

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.errors import RealizarError
from realizar.outputs import TokenLogprobs
from realizar.server.app import create_app
from realizar.server.http.sse import EventTemplate, encode_event
from realizar.server.openai import chat, completions
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model


class Inner(msgspec.Struct):
    text: str
    index: int = 0
    stop: None = None


class Outer(msgspec.Struct):
    model: str
    choices: list[Inner]
    text_offset: str = "text"


@given(
    model=st.text(max_size=20) | st.just('"text":""') | st.just("text"), text=st.text(max_size=40), index=st.integers()
)
def test_a_template_gives_the_bytes_of_its_record(model: str, text: str, index: int) -> None:
    index = max(min(index, 2**63 - 1), -(2**63))
    template = EventTemplate(Outer(model, [Inner("", index)]), "text")
    assert template.encode(text) == encode_event(Outer(model, [Inner(text, index)]))


class WithValue(msgspec.Struct):
    text: str
    other: None = None
    value: Any = None
    stop: None = None


@given(text=st.text(max_size=20) | st.just('"value":null'), value=st.none() | st.lists(st.integers(0, 9), max_size=3))
def test_a_template_gives_the_bytes_of_a_record_with_another_field(text: str, value: list[int] | None) -> None:
    template = EventTemplate(WithValue(""), "text", "value")
    assert template.encode(text, msgspec.json.encode(value)) == encode_event(WithValue(text, value=value))


def test_a_record_without_the_other_field_makes_no_template() -> None:
    with pytest.raises(ValueError, match="no null value behind text"):
        EventTemplate(WithValue("", value=3), "text", "value")


def test_a_record_without_the_text_makes_no_template() -> None:
    with pytest.raises(ValueError, match="no empty text text"):
        EventTemplate(Outer("m", [Inner("full")]), "text")


TEXTS = ("Hel", 'lo "you"\n', "", "\u2028 \\ é🙂", "<tool_call>", "\x7f\x00")
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


class SlowlyScripted(ScriptedEngine):
    """Gives each delta by itself."""

    def _play(self, stream: Any, prompt: tuple[int, ...], sampling: Any) -> None:
        asyncio.get_running_loop().create_task(self._play_apart(stream, prompt, sampling))

    async def _play_apart(self, stream: Any, prompt: tuple[int, ...], sampling: Any) -> None:
        deltas = self.deltas
        for count in range(1, len(deltas)):
            self.deltas = [deltas[count - 1], None]
            super()._play(stream, prompt, sampling)
            for _ in range(5):
                await asyncio.sleep(0)
        self.deltas = deltas[-1:]
        super()._play(stream, prompt, sampling)


def streamed(path: str, texts: Sequence[str | RealizarError | None], fields: dict[str, Any]) -> str:
    """The body of a streamed answer, without its id and time."""
    listed = TokenLogprobs(65, -0.5, 1, ((200, -0.25), (34, float("-inf")), (65, -0.5)))
    app = create_app(cast("Any", SlowlyScripted(texts, logprobs=listed)), scripted_model(), ServerSettings())

    async def main() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            body = {"model": "scripted", "stream": True, **REQUESTS[path], **fields}
            return (await client.post(path, json=body)).text

    return re.sub(r'"id":"[a-z]+-[0-9a-f]+"|"created":\d+', "", asyncio.run(main()))


LOGPROBS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"logprobs": 2},
    "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2},
}


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3}, {"stream_options": {"include_usage": True}}, {"stop": ["zzz"]}, {"with": "logprobs"}],
    ids=lambda f: str(f)[:12],
)
def test_streams_have_the_same_bytes_with_and_without_templates(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "with" in fields:
        fields = LOGPROBS[path]
    used: list[str] = []
    encode = EventTemplate.encode
    monkeypatch.setattr(
        EventTemplate, "encode", lambda self, text, *more: used.append(text) or encode(self, text, *more)
    )
    with_templates = streamed(path, TEXTS, fields)
    assert len(used) >= 3
    monkeypatch.setattr(chat._ChatEncoder, "_only_text", lambda self, gained: None)
    monkeypatch.setattr(completions._CompletionEncoder, "_only_text", lambda self, delta, logprobs: None)
    used.clear()
    assert streamed(path, TEXTS, fields) == with_templates
    assert used == []
    assert with_templates.endswith("data: [DONE]\n\n")
    assert ("-9999.0" in with_templates) == (fields == LOGPROBS[path])
