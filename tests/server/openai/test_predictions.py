"""`prediction` of a chat: the answer is what it would be, in fewer steps, and its usage says what the text brought."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import ServerThread

ASKED: dict[str, Any] = {
    "model": "smollm2", "messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0,
    "max_tokens": 48,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(smollm2_path: Path) -> Iterator[openai.OpenAI]:
    config = EngineConfig(
        device="cpu", threads=1, context_length=512, max_running=2, speculative_tokens=4, kv_cache_bytes=64 << 20
    )
    server = ServerThread(smollm2_path, ServerSettings(), config, names=("smollm2",), context=512)
    yield server.start().client()
    server.stop()


def ask(client: openai.OpenAI, **fields: Any) -> tuple[str, Any]:
    answer = client.chat.completions.create(**ASKED, **fields)
    return answer.choices[0].message.content, answer.usage


def test_a_prediction_with_a_change_brings_most_of_an_answer(client: openai.OpenAI) -> None:
    text, usage = ask(client)
    assert usage.completion_tokens_details is None
    words = text.split(" ")
    changed = " ".join([*words[:10], "unlike", *words[11:]])
    for content in (changed, [{"type": "text", "text": changed[:40]}, {"type": "text", "text": changed[40:]}]):
        again, usage = ask(client, prediction={"type": "content", "content": content})
        details = usage.completion_tokens_details
        assert again == text
        assert details.accepted_prediction_tokens > 24
        assert 0 < details.rejected_prediction_tokens < 12


def test_answers_with_drafts_have_llama_cpps_timings(client: openai.OpenAI) -> None:
    text, _ = ask(client)
    prediction = {"type": "content", "content": text}
    timings = client.chat.completions.create(**ASKED, prediction=prediction).model_extra["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] > 24
    assert timings["predicted_n"] == 48
    assert timings["predicted_ms"] == pytest.approx(48 * timings["predicted_per_token_ms"])
    assert timings["prompt_n"] + timings["cache_n"] == 38
    short = client.chat.completions.create(**{**ASKED, "max_tokens": 1})
    assert "timings" not in short.model_extra


def test_a_stream_says_it_at_its_end(client: openai.OpenAI) -> None:
    text, _ = ask(client)
    prediction = {"type": "content", "content": text}
    chunks = list(
        client.chat.completions.create(
            **ASKED, prediction=prediction, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].model_extra["timings"]["draft_n_accepted"] > 24
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 24


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": "x", "size": 1}, "prediction.size"),
        ({"type": "content", "content": "x " * 9000}, "prediction"),
    ],
)
def test_what_is_no_prediction_is_refused(client: openai.OpenAI, prediction: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, prediction=prediction)
    assert caught.value.param == param
