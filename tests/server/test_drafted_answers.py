"""Random requests over HTTP with drafts and without: the same answers, and streams that say what whole answers do.

Tools that may, must or shall be called, schemas, stop strings, several choices and log-probabilities, on models with a
window and with recurrent layers, while blocks run out and clients leave. `DRAFT_REQUESTS` in the environment is the
number of requests of each model; 24 by default.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from realizar.config import EngineConfig
from realizar.scheduler.drafts import DraftDepth
from realizar.server.settings import ServerSettings
from server_thread import NAME, RunningServer, ServerThread
from tiny_model import write_tiny_model
from waits import HANG_S

COUNT = int(os.environ.get("DRAFT_REQUESTS", "24"))
OPENS = "<tool_call>"  # id 257 of the vocabulary
TEMPLATE = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
SHARED = "It was a dark and stormy night; the rain fell in torrents. "


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


TOOLS = [
    tool("weather", city={"type": "string", "maxLength": 12}, days={"type": "integer", "maximum": 9}),
    tool("time", zone={"enum": ["UTC", "CET", "Europe/Rome"]}),
]
CHOICES: list[Any] = ["auto", "auto", "required", {"type": "function", "function": {"name": "weather"}}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["one", "two"]}, "b": {"type": "boolean"}}, "required": ["a"]}
FORMATS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"regex": "(ab|c){5,30}-[0-9]{3}"}},
]
SAMPLERS: dict[str, list[Any]] = {
    "top_p": [0.9], "top_k": [20], "min_p": [0.02], "presence_penalty": [0.5], "frequency_penalty": [0.4],
    "repetition_penalty": [1.1], "min_tokens": [5], "stop": [["|4"], ["1|>", "e"], ["zz", "|3"]],
}  # fmt: skip


def random_body(rng: random.Random) -> dict[str, Any]:
    text = SHARED * rng.choice([0, 2]) + "".join(rng.choices("abcdefgh ", k=rng.randrange(1, 30)))
    body: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": rng.choice([20, 60, 90]),
        "temperature": rng.choice([0, 0, 0.7, 4]), "seed": rng.randrange(1000), "n": rng.choice([1, 1, 1, 2, 3]),
    }  # fmt: skip
    body |= {name: rng.choice(SAMPLERS[name]) for name in rng.sample(sorted(SAMPLERS), rng.choice([0, 1, 2]))}
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.choice([0, 2])}
    kind = rng.random()
    if kind < 0.5:
        body |= {"tools": TOOLS, "tool_choice": rng.choice(CHOICES), "parallel_tool_calls": rng.random() < 0.5}
        if body["tool_choice"] == "auto":
            body["logit_bias"] = {"257": rng.choice([2, 8])}
    elif kind < 0.7:
        body |= rng.choice(FORMATS)
    return body


@dataclass
class Answer:
    """A choice. `calls` are pairs of a name and arguments; of a client that left it is what came until then."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    ended: str | None = None

    def take_in(self, part: dict[str, Any], choice: dict[str, Any]) -> None:
        """Take in a message, or a delta of one."""
        self.text += part.get("content") or ""
        self.reasoning += part.get("reasoning_content") or ""
        for made in part.get("tool_calls") or ():
            at = made.get("index", len(self.calls))
            if at == len(self.calls):
                self.calls.append([made["function"]["name"], ""])
            self.calls[at][1] += made["function"]["arguments"]
        self.logprobs += (choice.get("logprobs") or {}).get("content") or ()
        self.ended = choice["finish_reason"] or self.ended


Answers = dict[int, Answer]


def whole(client: httpx.Client, body: dict[str, Any]) -> Answers:
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = {choice["index"]: Answer() for choice in answer.json()["choices"]}
    for choice in answer.json()["choices"]:
        found[choice["index"]].take_in(choice["message"], choice)
    return found


def streamed(client: httpx.Client, body: dict[str, Any], patience: int | None = None) -> Answers:
    """With `patience`, until so many events have come."""
    found = {index: Answer() for index in range(body["n"])}
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        events = (line for line in answer.iter_lines() if line.startswith("data: {"))
        for event in itertools.islice(events, patience):
            for choice in json.loads(event.removeprefix("data: "))["choices"]:
                found[choice["index"]].take_in(choice["delta"], choice)
    return found


@contextmanager
def running(path: Path, **options: Any) -> Iterator[tuple[RunningServer, httpx.Client]]:
    config = EngineConfig(threads=1, max_running=12, context_length=256, kv_cache_bytes=640_000, **options)
    thread = ServerThread(path, ServerSettings(log_requests=False), config, context=256)
    server = thread.start()
    try:
        with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
            yield server, client
    finally:
        thread.stop()


@pytest.mark.parametrize(("shape", "drafter"), [("tiny-window", "itself"), ("tiny-delta", "lookup")])
def test_drafts_change_no_answer(shape: str, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftDepth, "take_in", lambda *_, **__: None)  # as many drafts as there may be
    path, rng = tmp_path / "tiny.gguf", random.Random(7)
    write_tiny_model(path, TEMPLATE, shape=shape, marks=[OPENS])
    bodies = [random_body(rng) for _ in range(COUNT)]
    leave = [rng.randrange(1, 6) if rng.random() < 0.3 else None for _ in bodies]
    with running(path) as (_, client), ThreadPoolExecutor(12) as pool:
        expected = list(pool.map(lambda body: whole(client, body), bodies))
    options = {"drafter": str(path) if drafter == "itself" else drafter, "speculative_tokens": 3}
    options |= {"prompt_lookup_min": 1, "prompt_lookup_max": 1}
    with running(path, **options) as (server, client), ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda body: whole(client, body), bodies))
        parts = list(pool.map(lambda body, patience: streamed(client, body, patience), bodies, leave))
        stats = server.stats_when_idle()
    for body, before, after, part, patience in zip(bodies, expected, found, parts, leave, strict=True):
        assert after == before, body
        if patience is None:
            assert part == before, body
        else:
            assert all(before[index].text.startswith(each.text) for index, each in part.items())
    assert stats.num_preemptions > 0 or shape == "tiny-window"  # whose rows keep few blocks
    assert sum(len(answer.calls) for each in expected for answer in each.values()) >= COUNT // 4
    assert 0.2 <= stats.accepted_tokens / stats.draft_tokens <= 0.8
