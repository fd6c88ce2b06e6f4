"""The requests of a mix: kinds by their weights, lengths by the published percentiles, fields by the server's names."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from realizar.bench.mix.dialects import LLAMA_CPP, OPENAI, REALIZAR, VLLM, Dialect, UnknownFieldsError, find_dialect
from realizar.bench.mix.kinds import KINDS, parse_weights
from realizar.bench.mix.lengths import TRACE_ANSWERS, TRACE_PROMPTS, Quantiles
from realizar.bench.mix.requests import MixRequest, MixWork, draw_request
from realizar.bench.serve_workload import Lengths
from realizar.errors import InvalidRequestError
from realizar.server.openai.records.chat import ChatCompletionRequest
from realizar.server.openai.records.completion import CompletionRequest

_SENT = {"model", "prompt", "messages", "max_tokens", "stream", "stream_options"}
_OF_OPENAI = {
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("stop", "n", "response_format", "tools", "tool_choice"),
}
# vLLM's sampling parameters in its API beside OpenAI's, and those of llama.cpp's `POST /completion`, from their pages.
_OF_VLLM = _OF_OPENAI | {"top_k", "min_p", "repetition_penalty", "ignore_eos", "structured_outputs"}
_OF_LLAMA_CPP = _OF_OPENAI | {
    *("top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "ignore_eos", "n_probs", "grammar"),
    *("json_schema", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
}


def work(**changes: Any) -> MixWork:
    return MixWork(**{"num_requests": 10, "concurrency": 2, "output_tokens": Lengths(100, 100), **changes})


def draw(load: MixWork, number: int = 0, dialect: Dialect = REALIZAR) -> MixRequest:
    return draw_request(load, number, dialect, "m")


def body_of(request: MixRequest) -> dict[str, Any]:
    return dict(json.loads(request.call.body))


def test_a_number_and_a_seed_make_a_request() -> None:
    load = work(leave_share=0.5)
    drawn = [draw(load, number) for number in range(40)]
    assert drawn == [draw(load, number) for number in range(40)]
    assert len({request.call.body for request in drawn}) == 40
    assert all(draw(work(seed=1, leave_share=0.5), number) != drawn[number] for number in range(40))


def test_kinds_come_as_often_as_they_weigh() -> None:
    counts = Counter(draw(work(), number).kind for number in range(3000))
    total = sum(kind.weight for kind in KINDS.values())
    for kind in KINDS.values():
        expected = 3000 * kind.weight / total
        assert abs(counts[kind.name] - expected) < 5 * expected**0.5 + 1, kind.name
    assert counts.most_common(1)[0][0] == "temperature-top-p"
    only = work(weights={"greedy": 1.0, "dry": 3.0})
    assert Counter(draw(only, number).kind for number in range(400))["dry"] == pytest.approx(300, abs=50)


@pytest.mark.parametrize(("lengths", "mean"), [(TRACE_PROMPTS, 830), (TRACE_ANSWERS, 271)])
def test_lengths_follow_the_trace(lengths: Quantiles, mean: float) -> None:
    rng = random.Random(1)
    drawn = np.asarray([lengths.draw(rng) for _ in range(20_000)])
    for share, length in lengths.points[1:]:
        assert np.percentile(drawn, 100 * share) == pytest.approx(length, rel=0.06)
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert lengths.mean == pytest.approx(mean, rel=0.08), "the study's own mean, which the percentiles do not use"


def test_requests_fit_into_the_context() -> None:
    longest = work(prompt_words=Lengths(6000, 6000), context_tokens=1000)
    request = draw(longest)
    assert request.was_shortened
    assert request.num_words * 1.3 + request.max_tokens <= 1000
    assert request.max_tokens == 100
    assert not draw(work(prompt_words=Lengths(50, 50), context_tokens=1000)).was_shortened
    assert draw(work(context_tokens=20)).num_words == 1


def test_some_clients_leave() -> None:
    drawn = [draw(work(leave_share=0.4), number).call for number in range(2000)]
    after_deltas = [call.leave_after_deltas for call in drawn if call.leave_after_deltas is not None]
    after_s = [call.leave_after_s for call in drawn if call.leave_after_s is not None]
    assert (len(after_deltas) + len(after_s)) / 2000 == pytest.approx(0.4, abs=0.05)
    assert len(after_s) / 2000 == pytest.approx(0.08, abs=0.03)
    assert 1 <= min(after_deltas) < max(after_deltas) < 100, "before the answer is complete"
    alone = [draw(work(), number).call for number in range(100)]
    assert {(call.leave_after_deltas, call.leave_after_s) for call in alone} == {(None, None)}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_realizar_knows_every_field(kind: str, chat: bool) -> None:
    """The server's own records refuse what they do not know."""
    request = draw(work(weights={kind: 1.0}, chat=chat))
    record = ChatCompletionRequest if request.call.chat else CompletionRequest
    msgspec.json.decode(request.call.body, type=record)
    assert request.call.chat == (chat or kind == "tools")
    assert {"temperature", "top_p", "top_k", "min_p", "ignore_eos"} <= set(body_of(request))


@pytest.mark.parametrize(
    ("dialect", "known", "lacking"),
    [
        (VLLM, _OF_VLLM, {"typical", "mirostat", "dry"}),
        (LLAMA_CPP, _OF_LLAMA_CPP, set()),
        (OPENAI, _OF_OPENAI, {"typical", "mirostat", "dry", "top-k-top-p-min-p", "penalties", "regex"}),
    ],
)
def test_peers_get_fields_that_they_know(dialect: Dialect, known: set[str], lacking: set[str]) -> None:
    refused = set()
    for kind in KINDS:
        for chat in (False, True):
            try:
                body = body_of(draw(work(weights={kind: 1.0}, chat=chat), dialect=dialect))
            except UnknownFieldsError:
                refused.add(kind)
            else:
                assert set(body) - _SENT <= known
    assert refused == lacking


def test_fields_have_each_servers_names() -> None:
    def sent(kind: str, dialect: Dialect, chat: bool = False) -> dict[str, Any]:
        return body_of(draw(work(weights={kind: 1.0}, chat=chat), dialect=dialect))

    assert sent("regex", REALIZAR)["structured_outputs"] == sent("regex", VLLM)["structured_outputs"]
    assert sent("regex", LLAMA_CPP)["grammar"].startswith("root ::=")
    assert sent("penalties", LLAMA_CPP)["repeat_penalty"] == sent("penalties", VLLM)["repetition_penalty"]
    assert sent("logprobs", REALIZAR)["logprobs"] == sent("logprobs", LLAMA_CPP)["n_probs"] == 5
    assert sent("logprobs", VLLM, chat=True)["top_logprobs"] == 5
    assert {str(id_): bias for id_, bias in sent("bias", LLAMA_CPP)["logit_bias"]} == sent("bias", VLLM)["logit_bias"]
    schema = sent("json-schema", REALIZAR)["response_format"]["json_schema"]["schema"]
    assert sent("json-schema", LLAMA_CPP)["json_schema"] == schema
    assert sent("json-schema", LLAMA_CPP, chat=True)["response_format"]["json_schema"]["schema"] == schema
    assert [find_dialect(owner) for owner in ("realizar", "vllm", "llamacpp", "x")] == [
        REALIZAR,
        VLLM,
        LLAMA_CPP,
        OPENAI,
    ]


def test_schemas_come_again() -> None:
    """An application sends its schema again and again; some requests bring a new one."""
    drawn = [body_of(draw(work(weights={"json-schema": 1.0}), number)) for number in range(300)]
    schemas = Counter(json.dumps(body["response_format"]["json_schema"]["schema"]) for body in drawn)
    again = [count for count in schemas.values() if count > 10]
    assert len(again) == 6
    assert sum(count for count in schemas.values() if count == 1) == pytest.approx(60, abs=30)


def test_weights() -> None:
    assert parse_weights(["greedy=2", "dry=0.5"], "mix-weights") == {"greedy": 2.0, "dry": 0.5}
    assert parse_weights(["greedy=2,dry=1"], "mix-weights") == {"greedy": 2.0, "dry": 1.0}
    assert parse_weights(["greedy=2,dry=0"], "mix-weights") == {"greedy": 2.0}
    assert set(parse_weights([], "mix-weights")) == set(KINDS)
    for wrong in ("greedy", "greedy=", "greedy=x", "greedy=-1", "greedy=inf", "greed=1", "greedy=0", ","):
        with pytest.raises(InvalidRequestError, match="mix-weights"):
            parse_weights([wrong], "mix-weights")


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": 1.0},
        {"num_requests": None},
        {"num_requests": 0},
        {"num_requests": None, "seconds": 0.0},
        {"rate_per_s": 1.0},
        {"concurrency": None},
        {"concurrency": 0},
        {"concurrency": None, "rate_per_s": float("inf")},
        {"leave_share": 1.5},
        {"leave_share": -0.1},
        {"shared_words": -1},
        {"weights": {"nonesuch": 1.0}},
        {"weights": {}},
    ],
)
def test_refused_loads(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        work(**changes)
