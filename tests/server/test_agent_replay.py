"""An agent's conversation of 20 turns, replayed through each API: a turn reads what no turn before it had.

Clients break prefixes: a header changes at each request, marks of the cache move, reasoning is left out, calls are
spelled otherwise. Tokens are bytes. One model has random weights: it is asked for a few tokens, and the conversation
goes on as it was written down. Another has layers with a state, and answers as it was.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import pytest

from clients.played_hybrid import BLOCK, PlayedHybrid, hybrid_server, num_common
from clients.played_model import Turn as Answer
from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import NAME, RunningServer, ServerThread
from tiny_model import write_tiny_model
from waits import HANG_S, wait_until

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONTEXT = 64 << 10
NUM_TURNS = 20
NUM_OUTPUT = 4
WORDS = random.Random(5)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOLS = {"read": "Read a file.", "edit": "Change a file."}


def prose(num_words: int) -> str:
    return " ".join("".join(WORDS.choices("abcdefgh", k=WORDS.randrange(2, 9))) for _ in range(num_words))


@dataclass(frozen=True)
class Turn:
    """What comes before a request: the model's answer to the one before, and then a text or the output of a tool."""

    answer: str
    call: str | None
    given: str


TURNS = [Turn(prose(12), None if place % 4 == 0 else f"call_{place}", prose(35)) for place in range(NUM_TURNS)]
SYSTEM = prose(200)
Body = tuple[str, dict[str, Any]]
Counts = tuple[int, int | None, int]
"""Tokens of the prompt, those that the cache had (None where an API does not tell), and those of the answer."""


def arguments(turn: Turn) -> dict[str, str]:
    return {"path": turn.answer[:9]}


def chat(turns: list[Turn], system: str, changing: str) -> Body:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for turn in turns:
        message: dict[str, Any] = {"role": "assistant", "content": turn.answer}
        if turn.call is None:
            messages += [*([message] if turn is not turns[0] else []), {"role": "user", "content": turn.given}]
            continue
        function = {"name": "read", "arguments": json.dumps(arguments(turn))}
        message["tool_calls"] = [{"id": turn.call, "type": "function", "function": function}]
        messages += [message, {"role": "tool", "tool_call_id": turn.call, "content": turn.given}]
    tools = [
        {"type": "function", "function": {"name": name, "description": text, "parameters": SCHEMA}}
        for name, text in TOOLS.items()
    ]
    more = {"metadata": {"header": changing}, "max_tokens": NUM_OUTPUT, "temperature": 0}
    return "/v1/chat/completions", {"messages": messages, "tools": tools, **more}


def ollama(turns: list[Turn], system: str, changing: str) -> Body:
    _, body = chat(turns, system, changing)
    for message in body["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            del call["type"], call["id"]
        if "tool_call_id" in message:
            message["tool_name"] = "read"
            del message["tool_call_id"]
    options = {"num_predict": NUM_OUTPUT, "temperature": 0}
    return "/api/chat", {"messages": body["messages"], "tools": body["tools"], "options": options, "stream": False}


def messages(turns: list[Turn], system: str, changing: str) -> Body:
    """Claude Code's header changes in the system prompt, and its mark of the cache moves to the last block."""
    made: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        text = {"type": "text", "text": turn.given}
        if turn.call is not None:
            call = {"type": "tool_use", "id": turn.call, "name": "read", "input": arguments(turn)}
            made.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}, call]})
            text = {"type": "tool_result", "tool_use_id": turn.call, "content": turn.given}
        elif place:
            made.append({"role": "assistant", "content": turn.answer})
        made.append({"role": "user", "content": [text]})
    made[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={changing};"}
    return "/v1/messages", {
        "system": [header, {"type": "text", "text": system}],
        "messages": made,
        "tools": [{"name": name, "description": text, "input_schema": SCHEMA} for name, text in TOOLS.items()],
        "metadata": {"user_id": changing},
        "max_tokens": NUM_OUTPUT,
        "temperature": 0,
    }


def responses(turns: list[Turn], system: str, changing: str) -> Body:
    items: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if place:
            content = [{"type": "output_text", "text": turn.answer, "annotations": []}]
            items.append({"type": "message", "id": f"msg_{place}", "role": "assistant", "content": content})
        if turn.call is None:
            items.append({"role": "user", "content": [{"type": "input_text", "text": turn.given}]})
            continue
        call = {"name": "read", "arguments": json.dumps(arguments(turn))}
        items.append({"type": "function_call", "call_id": turn.call, **call})
        items.append({"type": "function_call_output", "call_id": turn.call, "output": turn.given})
    return "/v1/responses", {
        "instructions": system,
        "input": items,
        "tools": [
            {"type": "function", "name": name, "description": text, "parameters": SCHEMA}
            for name, text in TOOLS.items()
        ],
        "client_metadata": {"x-codex-turn-metadata": changing},
        "store": False,
        "max_output_tokens": NUM_OUTPUT,
        "temperature": 0,
    }


def openai_counts(answer: Mapping[str, Any]) -> Counts:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def anthropic_counts(answer: Mapping[str, Any]) -> Counts:
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached
    return prompt, cached, usage["output_tokens"]


def responses_counts(answer: Mapping[str, Any]) -> Counts:
    usage = answer["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]


def ollama_counts(answer: Mapping[str, Any]) -> Counts:
    return answer["prompt_eval_count"], None, answer["eval_count"]


@pytest.fixture(scope="module")
def replay_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("replay") / "tiny.gguf"
    write_tiny_model(path, TEMPLATE, CONTEXT)
    config = EngineConfig(context_length=CONTEXT, max_running=2)
    thread = ServerThread(path, ServerSettings(), config, CONTEXT)
    yield thread.start()
    thread.stop()


BodyOf = Callable[[list[Turn], str, str], Body]
CountsOf = Callable[[Mapping[str, Any]], Counts]
each_api = pytest.mark.parametrize(
    ("body_of", "counts_of"),
    [
        (chat, openai_counts),
        (messages, anthropic_counts),
        (responses, responses_counts),
        (ollama, ollama_counts),
    ],
    ids=["chat", "messages", "responses", "ollama"],
)


@each_api
def test_a_turn_reads_what_is_new(
    replay_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    body_of: BodyOf,
    counts_of: CountsOf,
) -> None:
    server, engine = replay_server, replay_server.engine
    system = f"{body_of.__name__}: {SYSTEM}"  # no API finds the prompts of another
    prompts: list[tuple[int, ...]] = []
    generate = engine.generate

    async def noted(token_ids: Any, *args: Any, **options: Any) -> Any:
        prompts.append(tuple(token_ids))
        return await generate(token_ids, *args, **options)

    monkeypatch.setattr(engine, "generate", noted)
    block = engine.info.cached_block_tokens
    assert block
    before = server.wait(engine.stats())
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        for place in range(NUM_TURNS):
            path, body = body_of(TURNS[: place + 1], system, f"{place:05x}")
            response = client.post(path, json={"model": NAME, **body})
            assert response.status_code == 200, response.text
            prompt, cached, output = counts_of(response.json())
            after = server.wait(engine.stats())
            assert prompt == len(prompts[-1]) == after.prefix_cache_queries - before.prefix_cache_queries
            hits = after.prefix_cache_hits - before.prefix_cache_hits
            assert hits == (hits if cached is None else cached)
            assert 1 <= output == after.generation_tokens - before.generation_tokens
            assert after.prompt_tokens - before.prompt_tokens == prompt
            if place:
                common = num_common(prompts[-2], prompts[-1])
                assert common > len(prompts[-2]) - 16  # all but what begins the answer
                assert common - block < hits <= common
            before = after
    assert len(prompts) == NUM_TURNS
    assert len(prompts[-1]) > 6_000
    assert server.wait(engine.audit()) is None


def answer_before(place: int) -> Answer:
    """What a model with states answered before a turn: its reasoning is left out, or its call is spelled otherwise, in
    turn with answers that come back as they were.
    """
    turn = TURNS[place]
    think = "Which file may it be that says so?" if place % 4 == 1 else ""
    if turn.call is None:
        return Answer(turn.answer)
    if place % 4 == 2:
        call = json.dumps({"name": "read", "arguments": arguments(turn)}, separators=(",", ":"))
        return Answer(f"{turn.answer}\n<tool_call>\n{call}\n</tool_call>")
    return Answer(turn.answer, (("read", arguments(turn)),), think)


def improvised(_prompt: str, said: list[tuple[str, str]]) -> Answer:
    num_given = sum(role in ("user", "tool") for role, _ in said)
    return answer_before(num_given) if num_given < NUM_TURNS else Answer("That is all.")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, PlayedHybrid]]:
    backend = PlayedHybrid(improvised)
    thread = hybrid_server(tmp_path_factory.mktemp("hybrid"), backend)
    yield thread.start(), backend
    thread.stop()


@each_api
def test_a_turn_of_a_model_with_states_reads_what_is_new(
    hybrid: tuple[RunningServer, PlayedHybrid], body_of: BodyOf, counts_of: CountsOf
) -> None:
    server, backend = hybrid
    backend.runs.clear()
    system = f"{body_of.__name__}: {SYSTEM}"
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        for place in range(NUM_TURNS):
            path, body = body_of(TURNS[: place + 1], system, f"{place:05x}")
            for limit in body.keys() & {"max_tokens", "max_output_tokens"}:
                body[limit] = 400
            body.get("options", {}).pop("num_predict", None)
            response = client.post(path, json={"model": NAME, **body})
            assert response.status_code == 200, response.text
            wait_until(lambda count=place + 1: len(backend.runs) == count)  # type: ignore[misc]
            prompt, cached, _ = counts_of(response.json())
            assert (prompt, cached or backend.runs[-1].num_cached) == (
                len(backend.runs[-1].prompt),
                backend.runs[-1].num_cached,
            )
    for place, (before, run) in enumerate(pairwise(backend.runs), 1):
        shared = run.num_shared(backend.runs[:place])
        in_answer = shared - len(before.prompt)
        if place % 4 == 1:  # what opens an answer comes before its reasoning
            assert in_answer == 0
            assert shared - run.num_cached < BLOCK + len("\n assistant\n")
        elif place % 4 == 2:
            assert in_answer > len(TURNS[place].answer)
            assert shared - run.num_cached < BLOCK + len(' \n{"name":')
        else:
            assert in_answer == len(before.tokens) - len(before.prompt) - 1
            assert shared - run.num_cached < BLOCK
    assert server.wait(server.engine.audit()) is None
