"""Ollama's official client against a real server: whole and streamed answers, tools, schemas, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import ollama
import pytest

from server_thread import CONTEXT, RunningServer
from waits import HANG_S

MODEL = "org/smollm2"
ASK = [{"role": "user", "content": "How is the weather in Rome?"}]
NO_STOP = {"temperature": 0, "num_predict": 24}


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with ollama.Client(server.url, timeout=HANG_S) as client:
        yield client


def times_of(answer: Any) -> list[int]:
    return [answer.total_duration, answer.load_duration, answer.prompt_eval_duration, answer.eval_duration]


def test_chat_whole_and_streamed_are_the_same(client: Any) -> None:
    whole = client.chat(MODEL, ASK, options=NO_STOP)
    assert whole.message.role == "assistant"
    assert whole.message.content
    assert (whole.model, whole.done, whole.done_reason, whole.eval_count) == (MODEL, True, "length", 24)
    assert whole.prompt_eval_count > 10
    assert all(isinstance(found, int) and found > 0 for found in times_of(whole))
    assert whole.total_duration >= whole.prompt_eval_duration + whole.eval_duration
    parts = list(client.chat(f"{MODEL}:latest", ASK, stream=True, options=NO_STOP))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) > 2
    last = parts[-1]
    assert (last.model, last.done_reason, last.eval_count) == (f"{MODEL}:latest", "length", 24)
    assert last.message.content == ""
    assert all(found > 0 for found in times_of(last))


def test_stop_strings_and_seeds_are_honoured(client: Any) -> None:
    whole = client.chat(MODEL, ASK, options=NO_STOP).message.content
    word = whole.split()[3]
    stopped = client.chat(MODEL, ASK, options={**NO_STOP, "stop": [word]})
    assert stopped.done_reason == "stop"
    assert word not in stopped.message.content
    sampled = {"temperature": 1.5, "seed": 7, "num_predict": 16}
    first, again = (client.chat(MODEL, ASK, options=sampled).message.content for _ in range(2))
    assert first == again


def test_a_schema_is_kept(client: Any) -> None:
    properties = {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "maximum": 9}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    options = {"temperature": 0, "num_predict": 160}
    answer = client.chat(MODEL, ASK, format=schema, options=options)
    assert set(json.loads(answer.message.content)) == {"city", "days"}
    streamed = client.chat(MODEL, ASK, format=schema, options=options, stream=True)
    assert "".join(part.message.content for part in streamed) == answer.message.content
    anything = client.chat(MODEL, ASK, format="json", options=NO_STOP)
    assert anything.message.content.lstrip().startswith("{")


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name.
    """
    return f"Sunny in {city}"


def test_tools_from_functions_and_their_results_are_read(client: Any) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    later = [
        *ASK,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": weather("Rome")},
    ]
    for messages in (ASK, later):
        assert client.chat(MODEL, messages, tools=[weather], options=NO_STOP).done


def test_generate_whole_and_streamed_are_the_same(client: Any) -> None:
    whole = client.generate(MODEL, ASK[0]["content"], system="Be brief.", options=NO_STOP)
    assert whole.response
    assert (whole.done_reason, whole.eval_count) == ("length", 24)
    assert len(whole.context) == whole.prompt_eval_count + whole.eval_count
    parts = list(client.generate(MODEL, ASK[0]["content"], system="Be brief.", options=NO_STOP, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert parts[-1].context == whole.context
    later = client.generate(MODEL, "And tomorrow?", context=whole.context, options=NO_STOP)
    assert list(later.context[: len(whole.context)]) == list(whole.context)


def test_raw_prompts_with_log_probabilities(client: Any) -> None:
    options = {"temperature": 0, "num_predict": 4}
    made = client.generate(MODEL, "The capital of France is", raw=True, options=options, logprobs=True, top_logprobs=3)
    assert made.response == "".join(token.token for token in made.logprobs)
    assert len(made.logprobs) == made.eval_count == 4
    for token in made.logprobs:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token
    chat = client.chat(MODEL, ASK, options=options, logprobs=True)
    assert chat.message.content == "".join(token.token for token in chat.logprobs)


def test_the_model_is_listed_and_shown(client: Any) -> None:
    listed = client.list().models
    assert [model.model for model in listed] == [f"{MODEL}:latest", "other:latest"]
    assert listed[0].size > 50e6
    assert listed[0].modified_at.tzinfo is not None
    assert (listed[0].details.format, listed[0].details.family) == ("gguf", "llama")
    assert listed[0].details.parameter_size == "134.52M"
    (running,) = client.ps().models
    assert (running.model, running.context_length, running.digest) == (f"{MODEL}:latest", CONTEXT, listed[0].digest)
    assert running.expires_at.year > 9000
    shown = client.show(MODEL)
    assert shown.details.quantization_level.startswith("Q")
    assert shown.modelinfo["llama.context_length"] == CONTEXT
    assert shown.modelinfo["general.parameter_count"] == 134_515_008
    assert "<|im_start|>" in shown.template
    assert shown.license == "apache-2.0"
    assert shown.capabilities == ["completion", "embedding"]
    parameters = dict(line.split() for line in shown.parameters.splitlines())
    assert parameters["num_ctx"] == str(CONTEXT)
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.show("../../etc/passwd")
    assert caught.value.status_code == 404


def test_texts_are_embedded(client: Any, server: RunningServer) -> None:
    texts = ["How is the weather?", "A text about cats."]
    both = client.embed(MODEL, texts)
    assert [len(vector) for vector in both.embeddings] == [576, 576]
    assert all(sum(value * value for value in vector) == pytest.approx(1.0) for vector in both.embeddings)
    assert both.prompt_eval_count > 6
    assert both.total_duration >= both.load_duration > 0
    (alone,) = client.embed(MODEL, texts[1]).embeddings
    assert alone == both.embeddings[1] == client.embeddings(MODEL, texts[1]).embedding
    with server.client() as openai:
        assert openai.embeddings.create(model=MODEL, input=texts[1]).data[0].embedding == pytest.approx(alone)
    assert client.embed(MODEL, "").embeddings == client.embed(MODEL, []).embeddings == []
    assert client.embeddings(MODEL).embedding == []


def test_long_texts_are_cut_unless_that_is_refused(client: Any) -> None:
    text = "word " * 3 * CONTEXT
    (cut,) = client.embed(MODEL, text).embeddings
    (longer,) = client.embed(MODEL, text + "more", truncate=True).embeddings
    assert cut == longer
    assert client.embed(MODEL, text).prompt_eval_count == CONTEXT
    with pytest.raises(ollama.ResponseError, match="input"):
        client.embed(MODEL, text, truncate=False)
    with pytest.raises(ollama.ResponseError, match="dimensions"):
        client.embed(MODEL, "x", dimensions=8)


def test_models_are_found_but_not_changed(client: Any) -> None:
    assert client.pull(MODEL).status == "success"
    assert [line.status for line in client.pull(f"{MODEL}:latest", stream=True)] == ["success"]
    changes: list[Callable[[], Any]] = [
        lambda: client.pull("llama3"),
        lambda: client.pull("../../../etc/passwd"),
        lambda: list(client.pull("llama3", stream=True)),
        lambda: client.delete(MODEL),
        lambda: client.copy(MODEL, "mine"),
        lambda: client.create("mine", from_=MODEL),
        lambda: client.push(MODEL),
        lambda: client.create_blob(__file__),
    ]
    for change in changes:
        with pytest.raises(ollama.ResponseError, match="chosen by whoever runs it") as caught:
            change()
        assert caught.value.status_code == 400


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", ["/", "/api/version", "/api/tags"])
def test_clients_find_the_server(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 200
    assert bool(response.content) == (method == "GET")


def test_a_request_without_messages_finds_the_model_loaded(client: Any) -> None:
    assert client.chat(MODEL).done_reason == "load"
    (line,) = client.chat(MODEL, stream=True, keep_alive="5m")
    assert (line.done, line.done_reason, line.message.content) == (True, "load", "")


def test_errors_are_the_clients_own(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.chat("llama3", ASK)
    assert caught.value.status_code == 404
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="messages") as caught:
            list(client.chat(MODEL, [{"role": "user", "content": "word " * 5_000}], stream=stream))
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="text only"):
        client.chat(MODEL, [{**ASK[0], "images": [b"x"]}])
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(MODEL, ASK, think=True)
    with pytest.raises(ollama.ResponseError, match=r"options\.top_p"):
        client.chat(MODEL, ASK, options={"top_p": 3})
