"""`/v1/rerank` and `/v1/score` on a small reranker of random weights, against its head and hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import NAME, RunningServer, ServerThread
from tiny_model import write_reranker
from waits import HANG_S

DOCUMENTS = ["a cat", "a dog that barks", "nothing", "a cat"]


@pytest.fixture(scope="module")
def weight_and_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, RunningServer]]:
    path = tmp_path_factory.mktemp("reranker") / "reranker.gguf"
    weight = write_reranker(path, ["no", "yes"])
    thread = ServerThread(path, ServerSettings(max_prompts=8), EngineConfig(context_length=256, max_running=4))
    yield weight, thread.start()
    thread.stop()


@pytest.fixture
def api(weight_and_server: tuple[Any, RunningServer]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=weight_and_server[1].url, timeout=HANG_S) as client:
        yield client


def expected(weight_and_server: tuple[Any, RunningServer], query: str, document: str) -> float:
    """The probability of `yes`, from the engine's hidden state of the prompt as it must be."""
    weight, server = weight_and_server
    tokenizer = server.model.tokenizer
    first, second = (tokenizer.encode(text, parse_special=False) for text in (query, document))
    ids = [*tokenizer.encode("judge"), 256, *first, 300, *second, 256]
    vector = np.array(server.wait(server.engine.embed(ids, "last")).vector)
    logits = weight.astype(np.float64) @ vector
    return float(np.exp(logits[1] - logits.max()) / np.exp(logits - logits.max()).sum())


def test_documents_are_ordered(weight_and_server: Any, api: httpx.Client) -> None:
    body = {"model": NAME, "query": "pets?", "documents": DOCUMENTS}
    answer = api.post("/v1/rerank", json=body).raise_for_status().json()
    scores = [expected(weight_and_server, "pets?", text) for text in DOCUMENTS]
    order = sorted(range(4), key=lambda place: (-scores[place], place))
    assert [each["index"] for each in answer["results"]] == order
    assert [each["relevance_score"] for each in answer["results"]] == pytest.approx([scores[i] for i in order])
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[i] for i in order]
    assert answer["model"] == NAME
    tokens = sum(len("judge" + "pets?" + text) + 3 for text in DOCUMENTS)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (tokens, tokens)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_the_best_alone_without_texts(api: httpx.Client, path: str) -> None:
    body = {"query": "q", "documents": [{"text": "a"}, "b", "c"], "top_n": 2, "return_documents": False}
    results = api.post(path, json=body).raise_for_status().json()["results"]
    assert len(results) == 2
    assert all(set(each) == {"index", "relevance_score"} for each in results)
    assert results[0]["relevance_score"] >= results[1]["relevance_score"]
    everything = api.post(path, json={**body, "top_n": 0}).raise_for_status().json()["results"]
    assert everything[:2] == results
    assert sorted(each["index"] for each in everything) == [0, 1, 2]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_of_pairs(weight_and_server: Any, api: httpx.Client, path: str) -> None:
    one = api.post(path, json={"text_1": "q", "text_2": ["a", "b"]}).raise_for_status().json()
    wanted = [expected(weight_and_server, "q", text) for text in ("a", "b")]
    assert [each["score"] for each in one["data"]] == pytest.approx(wanted)
    assert [each["index"] for each in one["data"]] == [0, 1]
    both = api.post(path, json={"text_1": ["q", "r"], "text_2": ["a", "b"]}).raise_for_status().json()
    wanted = [expected(weight_and_server, *pair) for pair in (("q", "a"), ("r", "b"))]
    assert [each["score"] for each in both["data"]] == pytest.approx(wanted)
    alone = api.post(path, json={"text_1": "q", "text_2": "a"}).raise_for_status().json()
    assert alone["data"][0]["score"] == pytest.approx(one["data"][0]["score"])


def test_a_document_can_not_end_its_part(weight_and_server: Any, api: httpx.Client) -> None:
    """Control tokens and places of the template in texts stay text."""
    for query, document in (("a<|end|>b", "x"), ("q", "<|end|>{query}"), ("{document}", "x")):
        found = api.post("/score", json={"text_1": query, "text_2": document}).raise_for_status().json()
        assert found["data"][0]["score"] == pytest.approx(expected(weight_and_server, query, document))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rerank", {"query": "q", "documents": []}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a"] * 9}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/rerank", {"query": "q" * 3000, "documents": ["a"]}, "query"),
        ("/rerank", {"query": "q", "documents": ["a", "d" * 300]}, "documents[1]"),
        ("/rerank", {"query": "q" * 150, "documents": ["a", "d" * 150]}, "documents[1]"),
        ("/rerank", {"query": "q", "documents": [{"title": "a"}]}, "documents[0].title"),
        ("/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"documents": ["a"]}, "query"),
        ("/rerank", {"query": "q", "documents": "a"}, "documents"),
        ("/rerank", {"query": "q", "documents": ["a"], "colour": 1}, "colour"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": []}, "text_2"),
        ("/score", {"text_1": ["a", ""], "text_2": ["a", "b"]}, "text_1[1]"),
        ("/score", {"text_1": [""], "text_2": ["a", "b"]}, "text_1[0]"),
        ("/score", {"text_1": "", "text_2": ["a", "b"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": [5]}, "text_2[0]"),
    ],
)
def test_refused_by_name(api: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = api.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_other_models_are_no_rerankers(http: httpx.Client, path: str) -> None:
    body = {"query": "q", "documents": ["a"]} if path == "/v1/rerank" else {"text_1": "q", "text_2": "a"}
    answer = http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "ranking_not_supported")
