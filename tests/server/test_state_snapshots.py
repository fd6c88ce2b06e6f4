"""A model with states over HTTP: what requests did with snapshots stands in `usage`, in the log and in the metrics."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest

from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import NAME, RunningServer, ServerThread
from tiny_model import write_tiny_model
from waits import HANG_S

CONTEXT = 2048
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}assistant: "
LONG = "The quick brown fox jumps over the lazy dog. " * 12
COUNTERS = ("taken", "restored", "dropped")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with room for a few conversations, so that some blocks and snapshots are given up."""
    path = tmp_path_factory.mktemp("hybrid") / "tiny.gguf"
    write_tiny_model(path, TEMPLATE, CONTEXT, "tiny-convolution")
    config = EngineConfig(context_length=CONTEXT, max_running=2, max_step_tokens=64, kv_cache_bytes=3 << 20)
    thread = ServerThread(path, ServerSettings(embeddings="last"), config, CONTEXT)
    yield thread.start()
    thread.stop()


def chat(text: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": text}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 3, "temperature": 0}


def messages(text: str) -> tuple[str, dict[str, Any]]:
    turns = [{"role": "user", "content": text}]
    return "/v1/messages", {"system": LONG, "messages": turns, "max_tokens": 3, "temperature": 0}


def responses(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"instructions": LONG, "input": text, "max_output_tokens": 3, "temperature": 0}


def completions(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": f"{LONG}\n{text}", "max_tokens": 3, "temperature": 0}


def embeddings(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/embeddings", {"input": f"{LONG}\n{text}"}


def ollama(text: str) -> tuple[str, dict[str, Any]]:
    turns = [{"role": "system", "content": LONG}, {"role": "user", "content": text}]
    return "/api/chat", {"messages": turns, "stream": False, "options": {"num_predict": 3, "temperature": 0}}


def ollama_embed(text: str) -> tuple[str, dict[str, Any]]:
    return "/api/embed", {"input": f"{LONG}\n{text}"}


def of_usage(answer: Mapping[str, Any]) -> dict[str, int]:
    return dict(answer.get("usage", answer)["state_snapshots"])


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def in_the_log(line: str) -> dict[str, int]:
    return {name: int(count) for name, count in re.findall(r"snapshots_(\w+)=(\d+)", line)}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "snapshots_" in record.getMessage()]


@pytest.mark.parametrize("body_of", [chat, messages, responses, completions, embeddings, ollama, ollama_embed])
def test_usage_and_the_log_have_what_a_request_did(
    hybrid: RunningServer, caplog: pytest.LogCaptureFixture, body_of: Callable[[str], tuple[str, dict[str, Any]]]
) -> None:
    caplog.set_level(logging.INFO)
    hybrid.wait(hybrid.engine.clear_cache())
    before, total = hybrid.wait(hybrid.engine.stats()), dict.fromkeys((*COUNTERS, "fetched"), 0)
    with httpx.Client(base_url=hybrid.url, timeout=HANG_S) as client:
        for place, text in enumerate(("one question", "one question", "another")):
            path, body = body_of(text)
            answer = client.post(path, json={"model": NAME, **body})
            assert answer.status_code == 200, answer.text
            found = of_usage(answer.json())
            assert set(found) == {*COUNTERS, "fetched"}
            assert found["restored"] == (place > 0)
            assert found["taken"] > 0 or place > 0
            total = {name: count + found[name] for name, count in total.items()}
            wait_for(lambda count=place + 1: len(lines_of(caplog)) == count)  # type: ignore[misc]
            assert in_the_log(lines_of(caplog)[-1]) == {name: count for name, count in found.items() if count}
    after = hybrid.wait(hybrid.engine.stats())
    for name in COUNTERS:
        assert getattr(after, f"snapshots_{name}") - getattr(before, f"snapshots_{name}") == total[name]


def test_streams_end_with_them(hybrid: RunningServer) -> None:
    hybrid.wait(hybrid.engine.clear_cache())
    path, body = chat("a stream")
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client(base_url=hybrid.url, timeout=HANG_S) as client:
        events = client.post(path, json={"model": NAME, **body, **options}).text
        assert re.search(r'"state_snapshots":\{"taken":[1-9]\d*,"restored":0,"fetched":0,"dropped":0\}', events)
        path, body = messages("a stream")
        events = client.post(path, json={"model": NAME, **body, "stream": True}).text
        assert '"state_snapshots":{"taken":' in events


def test_blocks_of_an_answer_drop_snapshots_of_others(hybrid: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """All that `/metrics` counts as dropped stands in the line and in the usage of a request."""
    caplog.set_level(logging.INFO)
    before, dropped = hybrid.wait(hybrid.engine.stats()).snapshots_dropped, 0
    with httpx.Client(base_url=hybrid.url, timeout=HANG_S) as client:
        for place in range(24):
            path, body = completions("")
            body |= {"prompt": f"{place} {LONG}", "max_tokens": 300, "ignore_eos": True}
            dropped += of_usage(client.post(path, json={"model": NAME, **body}).json())["dropped"]
            if dropped > 1:
                break
    assert dropped == hybrid.wait(hybrid.engine.stats()).snapshots_dropped - before > 0
    wait_for(lambda: sum(in_the_log(line).get("dropped", 0) for line in lines_of(caplog)) == dropped)


def test_a_client_that_leaves_has_them_in_its_line(hybrid: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hybrid.wait(hybrid.engine.clear_cache())
    path, body = chat("leaves")
    body |= {"max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=hybrid.url, timeout=HANG_S) as client:
        with client.stream("POST", path, json={"model": NAME, **body}) as stream, hybrid.held_steps():
            next(line for line in stream.iter_lines() if line)
            stream.close()
        wait_for(lambda: any("disconnected" in line for line in lines_of(caplog)))
    assert in_the_log(lines_of(caplog)[-1])["taken"] > 0
