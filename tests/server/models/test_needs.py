"""Requests that a model's facts refuse: no model is loaded for them, and one that is loaded says the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from realizar.server.app import create_app_of
from realizar.server.model_facts import ModelFacts
from realizar.server.models.shelf import ModelShelf
from realizar.server.settings import ServerSettings
from server.models.shelf_case import Case, ScriptedLoader, known, run

HI = [{"role": "user", "content": "Hi"}]
FACTS = ModelFacts(format="gguf")
TEMPLATE = replace(FACTS, template="{{ messages }}")
CASES: dict[str, tuple[str, dict[str, Any], ModelFacts, str]] = {
    "chat": ("/v1/chat/completions", {"messages": HI}, FACTS, "no chat template"),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 3}, FACTS, "no chat template"),
    "tokens": ("/v1/messages/count_tokens", {"messages": HI}, FACTS, "no chat template"),
    "responses": ("/v1/responses", {"input": "Hi"}, FACTS, "no chat template"),
    "ollama": ("/api/chat", {"messages": HI}, FACTS, "no chat template"),
    "long answer": ("/v1/chat/completions", {"messages": HI, "max_tokens": 512}, TEMPLATE, "together 513"),
    "long answer, by its newer name": (
        "/v1/chat/completions", {"messages": HI, "max_completion_tokens": 9999}, TEMPLATE, "length is 512 tokens",
    ),
    "long completion": ("/v1/completions", {"prompt": "Hi", "max_tokens": 512}, FACTS, "length is 512 tokens"),
    "long ids": ("/v1/completions", {"prompt": [[1], [1] * 600], "max_tokens": 1}, FACTS, "prompt has 600 or"),
    "embeddings": ("/v1/embeddings", {"input": "Hi"}, FACTS, "not made for embeddings"),
    "ollama's": ("/api/embed", {"input": "Hi"}, FACTS, "not made for embeddings"),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}, FACTS, "not a reranker"),
    "score": ("/v1/score", {"text_1": "a", "text_2": "b"}, FACTS, "not a reranker"),
}  # fmt: skip
SERVED: dict[str, tuple[str, dict[str, Any], ModelFacts]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 511}, TEMPLATE),
    "own template": ("/v1/chat/completions", {"messages": HI, "chat_template": "Hi"}, FACTS),
    "completion": ("/v1/completions", {"prompt": "Hi", "max_tokens": 511}, FACTS),
    "cut ids": ("/v1/completions", {"prompt": [1] * 600, "truncate_prompt_tokens": 9, "max_tokens": 9}, FACTS),
    "cut answer": ("/v1/messages", {"messages": HI, "max_tokens": 9999}, TEMPLATE),
    "facts that were not read": ("/v1/chat/completions", {"messages": HI}, ModelFacts()),
}


def client_of(case: Case, facts: ModelFacts, settings: ServerSettings) -> tuple[ScriptedLoader, httpx.AsyncClient]:
    loader = ScriptedLoader({"a": 1}, 1)
    case.shelf = ModelShelf([known("a", 1, facts=facts)], loader.load, {"cpu": 1})
    transport = httpx.ASGITransport(create_app_of(case.shelf, settings))
    return loader, httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_loaded_for_a_request_that_can_not_be_served(name: str) -> None:
    path, body, facts, message = CASES[name]

    async def main(case: Case) -> None:
        loader, client = client_of(case, facts, ServerSettings())
        async with client:
            answer = await client.post(path, json={"model": "a", **body})
        assert answer.status_code == 400
        assert message in answer.text
        assert loader.log == []

    run(main)


@pytest.mark.parametrize("name", SERVED)
def test_what_may_be_served_loads_the_model(name: str) -> None:
    path, body, facts = SERVED[name]

    async def main(case: Case) -> None:
        settings = ServerSettings(allow_request_templates=True)
        loader, client = client_of(case, facts, settings)
        async with client:
            await client.post(path, json={"model": "a", **body})
        assert loader.log == ["+a"]

    run(main)
