"""A row that fails ends its request alone: the others' tokens are the same, its blocks are free, the audit is clean."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from number_text import NumberText
from realizar.batch import OpenedRow
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.prepare import prepare_request
from realizar.errors import (
    CapacityError,
    DeviceLostError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    StepError,
    StepMemoryError,
)
from realizar.kv_cache.block_keys import BlockKeys
from realizar.outputs import RowError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.drafts import DraftLookup
from realizar.scheduler.row_table import Sequence as ScheduledSequence
from realizar.scheduler.scheduler import Scheduler
from resolving import EngineClient, new_core
from scripted_backend import ScriptedBackend, ScriptedStep, expected_tokens, make_spec
from step_inputs import RowOutput, ScheduledRow, TokenOutput, stepped

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {name: tuple(range(start, start + 9)) for name, start in (("a", 1), ("b", 20), ("c", 40))}
BAD = 77  # in the prompt of the request that fails


class RowsFail(ScriptedBackend):
    """Fails rows whose prompt holds `BAD`: when opened, or at their n-th result. Rows that failed are closed too."""

    def __init__(self, *, opening: Exception | None = None, at: int = 0, error: RowError | None = None) -> None:
        super().__init__(num_blocks=(64,), block_size=4, num_ids=7)
        self.opening, self.at, self.error = opening, at, error
        self.results = 0

    def open(self, opened: OpenedRow) -> None:
        super().open(opened)
        if self.opening is not None and BAD in opened.history:
            raise self.opening

    def submit(self, forward_input: Any) -> ScriptedStep:
        step = super().submit(forward_input)
        honest = step._row_output

        def row_output(row: ScheduledRow, states: list[int]) -> RowOutput:
            output = honest(row, states)
            if row.sample and self.error is not None and BAD in self.rows[row.row].tokens:
                self.results += 1
                if self.results >= self.at:
                    return RowOutput((), error=self.error)
            return output

        step._row_output = row_output  # type: ignore[method-assign]
        return step


def make_core(backend: ScriptedBackend, in_flight: int = 1, speculative: int = 0) -> EngineCore:
    config = EngineConfig(max_running=1000, max_step_tokens=16, speculative_tokens=speculative)
    return new_core(backend, make_spec(backend.windows), config, steps_in_flight=in_flight)


def run(core: EngineCore) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = defaultdict(list)
    while core.has_work:
        for output in stepped(core):
            outputs[output.request_id].append(output)
        core.audit()
    return outputs


def check(core: EngineCore, error: RowError, sampling: SamplingParams = GREEDY) -> None:
    """One of four requests fails, once; the others get their tokens, before and after."""
    for name, prompt in PROMPTS.items():
        core.add(Request(name, prompt, GREEDY, 12))
        if name == "a":
            core.add(Request("bad", (*prompt[:8], BAD), sampling, 12))
    outputs = run(core)
    assert [output.error for output in outputs["bad"] if output.error is not None] == [error]
    assert outputs["bad"][-1].error == error
    for name, prompt in PROMPTS.items():
        found = [token_id for output in outputs[name] for token_id in output.token_ids]
        assert found == expected_tokens(prompt, (None,), GREEDY, 12, num_ids=7)
    assert all(group.used == 0 for group in core.cache.counts)
    core.add(Request("after", (*PROMPTS["a"][:8], 3), GREEDY, 5))
    found = [token_id for output in run(core)["after"] for token_id in output.token_ids]
    assert found == expected_tokens((*PROMPTS["a"][:8], 3), (None,), GREEDY, 5, num_ids=7)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.0, n=3)], ids=["one", "three"])
def test_a_row_of_a_step_fails(in_flight: int, at: int, sampling: SamplingParams) -> None:
    error = RowError("the model gave a logit of nan")
    check(make_core(RowsFail(at=at, error=error), in_flight), error, sampling)


def test_a_row_with_drafts_fails() -> None:
    error = RowError("the model gave a logit of nan")
    core = make_core(RowsFail(at=5, error=error), speculative=4)
    check(core, error)
    assert core.scheduler.counts.draft_tokens > 0


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (InvalidRequestError("an id beyond", "logit_bias"), RowError("an id beyond", "request", "logit_bias")),
        (MemoryError(), RowError("there is no memory for the request's sampler", "memory")),
        (CapacityError("the GPU is out of memory"), RowError("the GPU is out of memory", "memory")),
        (ZeroDivisionError("a bug"), RowError("the request's sampler failed: ZeroDivisionError")),
    ],
    ids=["request", "memory", "device", "bug"],
)
def test_a_row_can_not_be_opened(in_flight: int, raised: Exception, expected: RowError) -> None:
    """Its prompt is longer than a step, too: what it has registered in the cache must have been computed."""
    check(make_core(RowsFail(opening=raised), in_flight), expected)
    check(make_core(RowsFail(opening=raised), in_flight), expected, SamplingParams(temperature=0.0, n=2))
    check(make_core(RowsFail(opening=raised), in_flight), expected, SamplingParams(temperature=0.0, prompt_logprobs=2))


def test_a_lost_device_is_everyones() -> None:
    core = make_core(RowsFail(opening=DeviceLostError("the context is lost")))
    core.add(Request("bad", (1, BAD), GREEDY, 3))
    with pytest.raises(EngineDeadError, match="context is lost"):
        stepped(core)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_the_scheduler_makes_of_a_row_fails(in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Scheduler._register

    def register(self: Scheduler, sequence: ScheduledSequence) -> None:
        if BAD in sequence.token_ids.tolist() and len(sequence.token_ids) > 11:
            raise KeyError("a bug")
        honest(self, sequence)

    monkeypatch.setattr(Scheduler, "_register", register)
    check(make_core(RowsFail(), in_flight), RowError("the request's tokens failed: KeyError"))


def test_drafts_that_fail_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OverflowError("a bug")

    monkeypatch.setattr(DraftLookup, "propose", fail)
    core = make_core(RowsFail(), speculative=4)
    core.add(Request("a", PROMPTS["a"], GREEDY, 12))
    outputs = run(core)["a"]
    found = [token_id for output in outputs for token_id in output.token_ids]
    assert found == expected_tokens(PROMPTS["a"], (None,), GREEDY, 12, num_ids=7)
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_kernel_that_fails_ends_the_steps_requests(in_flight: int) -> None:
    class OneStepFails(RowsFail):
        def close(self, row: int) -> None:
            self.rows.pop(row, None)

        def submit(self, forward_input: Any) -> ScriptedStep:
            if self.num_steps == 2:
                self.num_steps += 1
                raise StepError("a kernel failed: ValueError")
            return super().submit(forward_input)

    core = make_core(OneStepFails(), in_flight)
    core.add(Request("a", PROMPTS["a"], GREEDY, 12))
    assert run(core)["a"][-1].error == RowError("a kernel failed: ValueError")
    core.add(Request("a", PROMPTS["a"], GREEDY, 12))
    found = [token_id for output in run(core)["a"] for token_id in output.token_ids]
    assert found == expected_tokens(PROMPTS["a"], (None,), GREEDY, 12, num_ids=7)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RowError("bad", "request", "min_tokens"), InvalidRequestError),
        (RowError("bad"), RequestFailedError),
        (RowError("bad", "memory"), StepMemoryError),
    ],
)
def test_a_waiting_caller_gets_the_cause_of_the_error(error: RowError, raised: type[Exception]) -> None:
    client = EngineClient(make_core(RowsFail(at=2, error=error)), NumberText, ())
    with pytest.raises(raised, match="bad") as caught:
        client.submit([1, BAD], replace(GREEDY, max_tokens=9)).result()
    assert getattr(caught.value, "param", None) == error.param
    assert len(client.submit([1, 2], replace(GREEDY, max_tokens=9)).result().outputs[0].token_ids) == 9
    client.close()


def test_min_tokens_without_an_id_to_sample_is_refused() -> None:
    """The model's own end ids count; a grammar may still leave its end."""
    sampling = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(96)))
    prepare_request("a", [1], sampling, vocab_size=97, max_request_tokens=10)
    with pytest.raises(InvalidRequestError, match="97 token ids end the output") as refused:
        prepare_request("a", [1], sampling, vocab_size=97, max_request_tokens=10, end_ids=[96])
    assert refused.value.param == "min_tokens"
    prepare_request("a", [1], replace(sampling, min_tokens=0), vocab_size=97, max_request_tokens=10, end_ids=[96])


def test_a_salt_of_half_a_character_is_a_salt() -> None:
    keys = [BlockKeys(2, salt).of(np.array((1, 2), np.int32))[0] for salt in (None, "a", "a\ud800", "a\ud801", "a?")]
    assert len(set(keys)) == len(keys)
