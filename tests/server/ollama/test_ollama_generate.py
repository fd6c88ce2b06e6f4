"""`/api/generate` with a scripted engine: prompts through the template and without it, contexts, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realizar.outputs import TokenLogprobs
from server.ollama.test_ollama_answers import TEMPLATE, cut, lines_of, post
from server.scripted_engine import ScriptedEngine

BODY: dict[str, Any] = {"model": "scripted", "prompt": "Hi"}


def ask(engine: ScriptedEngine, template: str | None = TEMPLATE, **fields: Any) -> dict[str, Any]:
    """The end of an answer, the same whole and streamed; `prompt` is that which the engine got."""
    response = post(engine, {**BODY, **fields, "stream": False}, "/api/generate", template)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    lines = lines_of(post(engine, {**BODY, **fields}, "/api/generate", template))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["response"] == ""
    for name in ("response", "thinking"):
        assert "".join(line.get(name, "") for line in lines) == whole.get(name, "")
    for name in ("context", "done_reason", "prompt_eval_count", "eval_count"):
        assert whole.get(name) == lines[-1].get(name)
    tokens = [token for line in lines for token in line.get("logprobs", [])]
    assert tokens == whole.get("logprobs", [])
    return {**whole, "prompt": bytes(engine.asked[-1][0]).decode()}


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_prompt_goes_through_the_template(size: int) -> None:
    engine = ScriptedEngine(deltas=cut("Hm.</think>Yes.", size))
    found = ask(engine, system="Be brief.")
    assert (found["thinking"], found["response"]) == ("Hm.", "Yes.")
    assert found["prompt"] == "system:Be brief.|user:Hi|<think>"
    assert found["context"] == [*engine.asked[-1][0], *[65] * len(engine.deltas)]
    assert found["prompt_eval_count"] + found["eval_count"] == len(found["context"])


def test_a_context_comes_before_the_prompt() -> None:
    engine = ScriptedEngine(deltas=("</think>a",))
    context = list(b"earlier|")
    assert ask(engine, context=context)["prompt"] == "earlier|user:Hi|<think>"
    assert (
        ask(engine, "\0{% for m in messages %}{{ m.content }}{% endfor %}", context=context)["prompt"] == "earlier|Hi"
    )
    ask(engine, context=context, options={"num_predict": 200_000})
    prompt, sampling, _ = engine.asked[-1]
    assert len(prompt) + sampling.max_tokens == 100_000


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_raw_prompts_and_base_models_go_on_with_the_text(template: str | None) -> None:
    engine = ScriptedEngine(deltas=("<think>", "is text"))
    found = ask(engine, template, raw=True, options={"num_predict": 200_000})
    assert (found["prompt"], found["response"]) == ("Hi", "<think>is text")
    assert "context" not in found
    assert engine.asked[-1][1].max_tokens == 100_000 - 2
    if template is None:
        assert ask(engine, template)["prompt"] == "Hi"


def test_logprobs_are_of_the_tokens_of_a_line() -> None:
    entry = TokenLogprobs(65, -0.5, 1, ((65, -0.5), (66, -1.5)))
    engine = ScriptedEngine(deltas=("</think>", "A", "B"), logprobs=entry)
    found = ask(engine, logprobs=True, top_logprobs=2)
    top = [{"token": "A", "logprob": -0.5, "bytes": [65]}, {"token": "B", "logprob": -1.5, "bytes": [66]}]
    assert found["logprobs"] == [{"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": top}] * 3
    assert "logprobs" not in ask(engine)


def test_a_schema_is_the_engines() -> None:
    engine = ScriptedEngine(deltas=("{}",))
    ask(engine, format={"type": "object"})
    structured = engine.asked[-1][1].structured
    reasoning, kind, value = json.loads(structured.value)  # the prompt opens reasoning, which comes first
    assert (structured.kind, kind, json.loads(value)) == ("nested", "json_schema", {"type": "object"})
    assert "</think>" in reasoning
    ask(engine, format="json", raw=True)
    assert engine.asked[-1][1].structured.kind == "json_object"


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"prompt": None, "keep_alive": 0}, {"prompt": "", "stream": False}])
def test_a_request_without_a_prompt_finds_the_model_loaded(fields: dict[str, Any]) -> None:
    response = post(ScriptedEngine(), {**BODY, **fields}, "/api/generate")
    assert response.status_code == 200
    assert {**response.json(), "created_at": ""} == {
        "model": "scripted",
        "created_at": "",
        "response": "",
        "done": True,
        "done_reason": "load",
    }


def test_a_model_that_is_being_loaded_is_not_said_to_be_there() -> None:
    response = post(ScriptedEngine(state="starting"), {**BODY, "prompt": ""}, "/api/generate")
    assert (response.status_code, set(response.json())) == (503, {"error"})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 7}, "prompt"),
    ({"images": ["aGk="]}, "images"),
    ({"suffix": "b"}, "suffix"),
    ({"raw": True, "system": "x"}, "system"),
    ({"raw": True, "context": [1]}, "context"),
    ({"raw": True, "think": True}, "think"),
    ({"context": [256]}, "context"),
    ({"context": [-1]}, "context"),
    ({"context": "x"}, "context"),
    ({"context": [1.5]}, "context"),
    ({"context": [1] * 100_001}, "context"),
    ({"prompt": "x" * 900_000}, "prompt"),
    ({"prompt": "x" * 900_000, "raw": True}, "prompt"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"raw": True, "options": {"top_p": 2}}, "options.top_p"),
    ({"format": []}, "format"),
    ({"steps": 4}, "steps"),
]


@pytest.mark.parametrize(
    ("fields", "path"), REFUSED, ids=[f"{path} {place}" for place, (_, path) in enumerate(REFUSED)]
)
def test_refusals_name_the_field(fields: dict[str, Any], path: str) -> None:
    response = post(ScriptedEngine(), {**BODY, **fields}, "/api/generate")
    assert response.status_code == 400, response.text
    (message,) = response.json().values()
    assert path in message
