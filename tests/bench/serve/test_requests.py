"""Requests of a load: kinds by their weights, lengths by the published percentiles, fields by the server's names."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from realizar.bench.serve.dialects import (
    LLAMA_CPP,
    OPENAI,
    REALIZAR,
    SGLANG,
    VLLM,
    Dialect,
    UnknownFieldsError,
    find_dialect,
)
from realizar.bench.serve.kinds import KINDS, parse_weights
from realizar.bench.serve.workload import (
    TRACE_ANSWERS,
    TRACE_PROMPTS,
    Lengths,
    PlannedRequest,
    Protocol,
    Quantiles,
    Workload,
    draw_request,
)
from realizar.errors import InvalidRequestError
from realizar.server.openai.records import ChatCompletionRequest, CompletionRequest

_SENT = {"model", "prompt", "messages", "max_tokens", "stream", "stream_options"}
_OF_OPENAI = {
    *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("stop", "n", "response_format", "tools", "tool_choice"),
    "ignore_eos",  # which a server that refuses it is spared
}
# Sampling parameters of SGLang's and vLLM's APIs beside OpenAI's, and those of llama.cpp's `POST /completion`, from
# their pages.
_OF_VLLM = _OF_OPENAI | {"top_k", "min_p", "repetition_penalty", "structured_outputs"}
_OF_SGLANG = _OF_VLLM - {"structured_outputs"} | {"regex"}
_OF_LLAMA_CPP = _OF_OPENAI | {
    *("top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "ignore_eos", "n_probs", "grammar"),
    *("json_schema", "mirostat", "mirostat_tau", "mirostat_eta"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
}


def work(**changes: Any) -> Workload:
    return Workload(**{"num_requests": 10, "concurrency": 2, "output_tokens": Lengths(100, 100), **changes})


def draw(load: Workload, number: int = 0, dialect: Dialect = REALIZAR) -> PlannedRequest:
    return draw_request(load, number, dialect, "m")


def body_of(request: PlannedRequest) -> dict[str, Any]:
    return dict(json.loads(request.body))


def test_a_number_and_a_seed_make_a_request() -> None:
    load = work(leave_share=0.5)
    drawn = [draw(load, number) for number in range(40)]
    assert drawn == [draw(load, number) for number in range(40)]
    assert len({request.body for request in drawn}) == 40
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
    assert drawn.mean() == pytest.approx(mean, rel=0.09), "the study's own mean, which the percentiles do not use"


def test_requests_fit_into_the_context() -> None:
    longest = work(prompt_length=Lengths(6000, 6000), context_tokens=1000)
    request = draw(longest)
    assert request.was_shortened
    assert request.prompt_length * 1.3 + request.max_tokens <= 1000
    assert request.max_tokens == 100
    assert not draw(work(prompt_length=Lengths(50, 50), context_tokens=1000)).was_shortened
    assert draw(work(context_tokens=20)).prompt_length == 1


def test_some_clients_leave() -> None:
    drawn = [draw(work(leave_share=0.4), number) for number in range(2000)]
    after_deltas = [call.leave_after_deltas for call in drawn if call.leave_after_deltas is not None]
    after_s = [call.leave_after_s for call in drawn if call.leave_after_s is not None]
    assert (len(after_deltas) + len(after_s)) / 2000 == pytest.approx(0.4, abs=0.05)
    assert len(after_s) / 2000 == pytest.approx(0.08, abs=0.03)
    assert 1 <= min(after_deltas) < max(after_deltas) < 100, "before the answer is complete"
    alone = [draw(work(), number) for number in range(100)]
    assert {(call.leave_after_deltas, call.leave_after_s) for call in alone} == {(None, None)}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_realizar_knows_every_field(kind: str, chat: bool) -> None:
    """The server's own records refuse what they do not know."""
    request = draw(work(weights={kind: 1.0}, chat=chat))
    record = ChatCompletionRequest if request.chat else CompletionRequest
    msgspec.json.decode(request.body, type=record)
    assert request.chat == (chat or kind == "tools")
    assert {"temperature", "top_p", "top_k", "min_p", "ignore_eos"} <= set(body_of(request))


@pytest.mark.parametrize(
    ("dialect", "known", "lacking"),
    [
        (VLLM, _OF_VLLM, {"typical", "mirostat", "dry"}),
        (SGLANG, _OF_SGLANG, {"typical", "mirostat", "dry"}),
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
    assert sent("regex", SGLANG)["regex"] == sent("regex", VLLM)["structured_outputs"]["regex"]
    assert sent("regex", LLAMA_CPP)["grammar"].startswith("root ::=")
    assert sent("penalties", LLAMA_CPP)["repeat_penalty"] == sent("penalties", VLLM)["repetition_penalty"]
    assert sent("logprobs", REALIZAR)["logprobs"] == sent("logprobs", LLAMA_CPP)["n_probs"] == 5
    assert sent("logprobs", VLLM, chat=True)["top_logprobs"] == 5
    assert {str(id_): bias for id_, bias in sent("bias", LLAMA_CPP)["logit_bias"]} == sent("bias", VLLM)["logit_bias"]
    schema = sent("json-schema", REALIZAR)["response_format"]["json_schema"]["schema"]
    assert sent("json-schema", LLAMA_CPP)["json_schema"] == schema
    assert sent("json-schema", LLAMA_CPP, chat=True)["response_format"]["json_schema"]["schema"] == schema
    assert [find_dialect(owner) for owner in ("realizar", "vllm", "sglang", "llamacpp", "x")] == [
        REALIZAR,
        VLLM,
        SGLANG,
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
        {"rate_per_s": 0.0},
        {"num_requests": None, "seconds": 1.0, "concurrency": None},
        {"concurrency": 0},
        {"rate_per_s": float("inf")},
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


def test_words_that_all_prompts_share() -> None:
    load = work(shared_words=6, prompt_length=Lengths(3, 9), output_tokens=Lengths(1, 4))
    drawn = [draw(load, number) for number in range(500)]
    prompts = [body_of(request)["prompt"].split() for request in drawn if not request.chat]
    assert {len(prompt) - 6 for prompt in prompts} == set(range(3, 10))
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 1
    assert {request.max_tokens for request in drawn} == {1, 2, 3, 4}
    assert {request.prompt_length for request in drawn} == set(range(9, 16))


def test_prompts_of_token_ids_have_exact_lengths() -> None:
    """Chats can't have them; nothing is shortened, and the answer must hold a text."""
    load = work(
        token_ids=True, exact=True, prompt_length=Lengths(700, 800), context_tokens=100, weights={"greedy": 1.0}
    )
    drawn = [draw(load, number) for number in range(50)]
    prompts = [body_of(request)["prompt"] for request in drawn]
    assert all(
        700 <= len(prompt) == request.prompt_length <= 800 for prompt, request in zip(prompts, drawn, strict=True)
    )
    assert all(300 <= id_ < 30_000 for prompt in prompts for id_ in prompt)
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 50, "no prefix is in a cache"
    assert not any(request.was_shortened or request.may_be_empty for request in drawn)
    (message,) = body_of(draw(work(token_ids=True, chat=True, weights={"greedy": 1.0})))["messages"]
    assert isinstance(message["content"], str)


def test_fields_of_every_request() -> None:
    request = draw(work(weights={"temperature": 1.0}, fields={"temperature": 0.25}))
    assert body_of(request)["temperature"] == 0.25


@pytest.mark.parametrize(
    ("protocol", "ratio", "ends"),
    [  # as compute_random_lens of SGLang and RandomDataset of vLLM give them for a length of 1,000
        ("sglang", 1.0, (1000, 1000)),
        ("sglang", 0.8, (800, 1000)),
        ("sglang", 0.0, (1, 1000)),
        ("vllm", 0.0, (1000, 1000)),
        ("vllm", 0.25, (750, 1250)),
        ("vllm", 0.9995, (1, 2000)),
    ],
)
def test_range_ratios(protocol: Protocol, ratio: float, ends: tuple[int, int]) -> None:
    assert Lengths.around(1000, ratio, protocol) == Lengths(*ends)


@pytest.mark.parametrize(("protocol", "ratio"), [("sglang", 1.1), ("sglang", -0.1), ("vllm", 1.0), ("vllm", -0.1)])
def test_refused_range_ratios(protocol: Protocol, ratio: float) -> None:
    with pytest.raises(InvalidRequestError, match="random-range-ratio must be from 0"):
        Lengths.around(1000, ratio, protocol)


def test_lengths() -> None:
    assert Lengths.parse("128", "x") == Lengths(128, 128)
    assert Lengths.parse("64-256", "x") == Lengths(64, 256)
    for wrong in ("", "0", "-3", "5-2", "a", "1-2-3", "1.5"):
        with pytest.raises(InvalidRequestError, match="prompt-words"):
            Lengths.parse(wrong, "prompt-words")
