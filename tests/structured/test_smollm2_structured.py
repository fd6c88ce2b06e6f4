"""Structured output and drafts end to end, on SmolLM2."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from realizar import LLM, SamplingParams
from realizar.engine.frontend.outputs import RequestOutput
from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput
from resolving import core_of
from structured.schemas import HANDMADE

NAMES = (
    "person", "optional value", "nested", "const", "one of, distinguished by a constant", "tool call",
    "enum of odd strings", "ipv4", "bounded integer", "pattern",
)  # fmt: skip
PROMPT = "Bob is a 42 years old plumber from Paris. Here he is, as JSON:\n"
REPETITIVE = "One potato, two potatoes, three potatoes, four. One potato, two potatoes, three"


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(smollm2_path, threads=1, context_length=512, max_running=16) as made:
        yield made


def run(llm: LLM, samplings: dict[str, SamplingParams], prompt: str = PROMPT) -> dict[str, RequestOutput]:
    """The outputs of requests that run together, by name."""
    streams = {name: llm.stream(prompt, sampling) for name, sampling in samplings.items()}
    return {name: stream.result() for name, stream in streams.items()}


def structured(kind: str, value: str, **changes: object) -> SamplingParams:
    fields = {"temperature": 0.0, "max_tokens": 90, **changes}
    return SamplingParams(structured=StructuredOutput(kind, value), **fields)  # type: ignore[arg-type]


def test_json_schemas_beside_plain_text(llm: LLM) -> None:
    """Ten schemas and two plain rows in one batch: valid JSON, and the plain texts are those they have alone."""
    validators = pytest.importorskip("jsonschema_rs", reason="the validator comes with schemathesis")
    plain = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
    sampled = SamplingParams(temperature=0.9, seed=7, max_tokens=40)
    alone = {"plain": run(llm, {"plain": plain})["plain"], "sampled": run(llm, {"sampled": sampled})["sampled"]}
    samplings = {name: structured("json_schema", json.dumps(HANDMADE[name])) for name in NAMES}
    found = run(llm, {**samplings, "plain": plain, "sampled": sampled})
    for name in NAMES:
        (output,) = found[name].outputs
        assert output.finish_reason == "stop", f"{name}: {output.text!r}"
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **HANDMADE[name]}
        validators.validator_for(schema, validate_formats=True).validate(json.loads(output.text))
    for name, expected in alone.items():
        assert found[name].outputs == expected.outputs


def test_other_grammars(llm: LLM) -> None:
    found = run(
        llm,
        {
            "regex": structured("regex", "[A-Z][a-z]{2,8} is [0-9]{2}"),
            "choice": structured("choice", '["plumber", "baker"]'),
            "lark": structured("lark", 'start: "<" NAME ("," NAME){1,3} ">"\nNAME: /[A-Z][a-z]{1,6}/'),
            "sampled": structured("regex", "(ab|cd){2,4}", temperature=1.5, seed=3, top_p=0.9),
        },
    )
    texts = {name: output.outputs[0].text for name, output in found.items()}
    assert re.fullmatch("[A-Z][a-z]{2,8} is [0-9]{2}", texts["regex"])
    assert texts["choice"] in ("plumber", "baker")
    assert re.fullmatch("<[A-Z][a-z]{1,6}(,[A-Z][a-z]{1,6}){1,3}>", texts["lark"])
    assert re.fullmatch("(ab|cd){2,4}", texts["sampled"])
    assert {output.outputs[0].finish_reason for output in found.values()} == {"stop"}


def test_any_object_is_the_beginning_of_one(llm: LLM) -> None:
    """A limit of too few tokens cuts the object, and the text is the start of an object."""
    (output,) = run(llm, {"a": structured("json_object", "", max_tokens=20)})["a"].outputs
    assert output.finish_reason == "length"
    assert output.text.startswith("{")


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    output = run(llm, {"a": structured("choice", '["zebra", "quokka"]', logprobs=2)})["a"]
    (choice,) = output.outputs
    assert choice.logprobs is not None
    scores = llm.score([*output.prompt_token_ids, *choice.token_ids], 2)[len(output.prompt_token_ids) :]
    for found, expected in zip(choice.logprobs, scores, strict=True):
        assert expected is not None
        assert (found.token_id, found.rank, found.top) == (expected.token_id, expected.rank, expected.top)
        assert found.logprob == expected.logprob


def test_an_impossible_schema_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="not"):
        llm.generate(PROMPT, structured("json_schema", '{"not": {}}'))


def test_drafts_change_no_text(llm: LLM, smollm2_path: Path) -> None:
    """Greedy and sampled rows, with and without a grammar: fewer steps, same tokens, same log-probabilities."""
    items = '{"type": "array", "items": {"const": "potatoes"}, "minItems": 6, "maxItems": 6}'
    samplings = {
        "greedy": SamplingParams(temperature=0, max_tokens=48, logprobs=1),
        "sampled": SamplingParams(temperature=0.7, top_p=0.95, seed=5, max_tokens=48, logprobs=1),
        "penalised": SamplingParams(temperature=0, max_tokens=48, repetition_penalty=1.1, dry_multiplier=0.8),
        "mirostat": SamplingParams(temperature=1, mirostat=2, mirostat_tau=2.0, seed=5, max_tokens=48),
        "grammar": structured("json_schema", items, logprobs=1),
    }
    expected = run(llm, samplings, REPETITIVE)
    with LLM(smollm2_path, threads=1, context_length=512, max_running=16, speculative_tokens=5) as drafting:
        found = run(drafting, samplings, REPETITIVE)
        counts = core_of(drafting).scheduler.counts
    for name in samplings:
        assert found[name].outputs == expected[name].outputs, name
    assert counts.draft_tokens > counts.accepted_tokens > 5
    assert json.loads(found["grammar"].outputs[0].text) == ["potatoes"] * 6


@pytest.mark.parametrize("stop", [(), ("!",)], ids=["ends itself", "ends by a stop string"])
def test_more_grammars_than_may_be_open(llm: LLM, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]) -> None:
    """Prompts wait for those before them; what is done then takes up no room of later calls."""
    service = core_of(llm).grammars._made_service()
    few = replace(service._limits, grammars=2, idle=2)
    monkeypatch.setattr(service, "_limits", few)
    monkeypatch.setattr(service.known, "_limits", few)
    reported: list[tuple[int, int]] = []
    for first in (0, 5):
        words = [f"w{number}" for number in range(first, first + 5)]
        samplings = [structured("regex", f"{word}!", stop=stop) for word in words]
        outputs = llm.generate([PROMPT] * 5, samplings, progress=lambda *counts: reported.append(counts))
        assert [output.outputs[0].text for output in outputs] == [word if stop else f"{word}!" for word in words]
    assert {total for _, total in reported} == {5}


def test_more_prompts_than_may_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = core_of(llm).scheduler
    monkeypatch.setattr(scheduler, "_max_queued", 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    assert len(llm.generate([[number] for number in range(5, 45)], sampling)) == 40
