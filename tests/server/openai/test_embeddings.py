"""Embeddings through the official client, against the engine's own hidden states."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from server_thread import RunningServer

MODEL = "org/smollm2"


def embed(client: openai.OpenAI, given: Any, **fields: Any) -> Any:
    return client.embeddings.create(model=MODEL, input=given, **fields)


def test_vectors_of_unit_length_in_the_order_of_the_inputs(client: openai.OpenAI, server: RunningServer) -> None:
    answer = embed(client, ["a cat", "a dog", "a cat"])
    vectors = np.array([each.embedding for each in answer.data])
    assert vectors.shape == (3, server.engine.info.hidden_size)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert np.array_equal(vectors[0], vectors[2])
    assert not np.array_equal(vectors[0], vectors[1])
    assert (answer.object, answer.model, answer.data[0].object) == ("list", MODEL, "embedding")
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6


def test_what_the_engine_pools(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.model.tokenizer.encode("a cat")
    pooled = server.wait(server.engine.embed(ids, "last")).vector
    wanted = np.array(pooled) / np.linalg.norm(pooled)
    assert np.array(embed(client, "a cat").data[0].embedding) == pytest.approx(wanted, abs=1e-6)


def test_forms_of_input_and_output(client: openai.OpenAI, http: httpx.Client, server: RunningServer) -> None:
    ids = server.model.tokenizer.encode("a cat")
    by_text = embed(client, "a cat").data[0].embedding
    assert embed(client, ids).data[0].embedding == by_text
    assert [each.embedding for each in embed(client, [ids, ids]).data] == [by_text, by_text]
    assert embed(client, "a cat", encoding_format="float").data[0].embedding == pytest.approx(by_text, abs=1e-7)
    raw = http.post("/v1/embeddings", json={"model": MODEL, "input": "a cat", "encoding_format": "base64"}).json()
    assert np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").tolist() == by_text
    size = server.engine.info.hidden_size
    assert embed(client, "a cat", dimensions=size, user="me").data[0].embedding == by_text
