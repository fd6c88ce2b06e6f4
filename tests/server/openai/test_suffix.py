"""`suffix` of a completion: the prompt and the suffix around the vocabulary's marks of a hole."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from realizar.tokenizer.tokenizer import FillInIds
from server.scripted_engine import ByteTokenizer, ScriptedEngine, scripted_model

MARKS = FillInIds(250, 251, 252)


def asked(
    body: dict[str, Any], marks: FillInIds | None = MARKS, *, add_bos: bool = False
) -> tuple[int, dict[str, Any], list[tuple[int, ...]]]:
    """The status and body of an answer, and the prompts that the engine got."""
    engine, model = ScriptedEngine(), scripted_model()
    tokenizer = cast("ByteTokenizer", model.tokenizer)
    tokenizer.fill_in, tokenizer.add_bos = marks, add_bos
    app = create_app(cast("Any", engine), model, ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/completions", json={"model": "scripted", **body})

    answer = asyncio.run(main())
    return answer.status_code, answer.json(), [prompt for prompt, *_ in engine.asked]


@pytest.mark.parametrize(
    ("fields", "prompts"),
    [
        ({"prompt": "ab", "suffix": "cd"}, [(250, 97, 98, 251, 99, 100, 252)]),
        ({"prompt": "", "suffix": "cd"}, [(250, 251, 99, 100, 252)]),
        ({"prompt": ["a", ""], "suffix": "c"}, [(250, 97, 251, 99, 252), (250, 251, 99, 252)]),
        ({"prompt": [97, 98], "suffix": "c"}, [(250, 97, 98, 251, 99, 252)]),
        ({"prompt": "ab", "suffix": ""}, [(97, 98)]),
        ({"prompt": "ab", "suffix": None}, [(97, 98)]),
    ],
)
def test_the_suffix_is_around_the_hole(fields: dict[str, Any], prompts: list[tuple[int, ...]]) -> None:
    status, body, found = asked(fields)
    assert (status, found) == (200, prompts)
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("add_special", [True, False, None])
def test_bos_comes_first(add_special: bool | None) -> None:
    """Once, where the model wants one and the request does not leave it out."""
    _, _, found = asked({"prompt": "a", "suffix": "c", "add_special_tokens": add_special}, add_bos=True)
    assert found == [(250, 97, 251, 99, 252) if add_special is False else (0, 250, 97, 251, 99, 252)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": 5}, "suffix"),
        ({"suffix": "x" * 3_000_000}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"suffix": "x", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"suffix": "x", "prompt": None}, "prompt"),
        ({"suffix": "x", "prompt": []}, "prompt"),
        ({"suffix": "x", "prompt": [300]}, "prompt"),
        ({"suffix": "x" * 10_000, "prompt": ["a"] * 60}, "prompt"),  # more tokens together than a request may have
    ],
)
def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    status, body, found = asked({"prompt": "a", **fields})
    assert (status, body["error"]["param"], found) == (400, param, [])


def test_a_vocabulary_without_marks() -> None:
    status, body, _ = asked({"prompt": "a", "suffix": "b"}, marks=None)
    assert (status, body["error"]["param"]) == (400, "suffix")
