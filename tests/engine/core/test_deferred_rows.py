"""Rows whose masks are late: they are deferred for a step, their texts stay the same, and nobody waits for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine.core.late_service import LateService
from grammar_services import LastingService
from realizar.backends.base import ForwardInput
from realizar.batch import StepOutput
from realizar.engine.core.row_grammars import Patience
from realizar.errors import CapacityError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import WorkerLimits
from scripted_backend import ScriptedBackend, ScriptedStep, expected_tokens
from step_inputs import TokenOutput, stepped
from structured.grammar_engines import (
    END,
    GRAMMAR_TOKENS,
    GRAMMARS,
    alone,
    check_mixed,
    new_engine,
    run_out,
    structured_request,
    tokens_of,
)
from structured.grammar_followers import end_harmless_workers, end_workers
from waits import HANG_S


@pytest.fixture(scope="module")
def service() -> Iterator[LateService]:
    made = LateService()
    yield made
    made.end()


@pytest.fixture
def late(service: LateService, monkeypatch: pytest.MonkeyPatch) -> LateService:
    """The service; no step waits for a mask that is late."""
    monkeypatch.setattr(Patience, "left_s", lambda *_: 0.0)
    monkeypatch.setattr(service, "lateness", lambda row: (row.slot * 7 + len(row.output) * 3) % 5)
    return service


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows that are deferred, by step with any."""
    counts: list[int] = []
    defer = ScriptedStep.defer

    def note(self: ScriptedStep, rows: Any) -> None:
        counts.append(len(rows))
        defer(self, rows)

    monkeypatch.setattr(ScriptedStep, "defer", note)
    return counts


OPTIONS: list[dict[str, Any]] = [
    {"steps_in_flight": 1},
    {"steps_in_flight": 2},
    {"steps_in_flight": 1, "speculative_tokens": 4},
    {"steps_in_flight": 2, "speculative_tokens": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("windows", [(None,), (6,), (5, None)], ids=str)
def test_texts_of_deferred_rows_are_the_same(
    late: LateService, deferred: list[int], options: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    backend = ScriptedBackend(windows, num_blocks=(64,) * len(windows), num_ids=4)
    core = new_engine(backend, lambda: late, **options)
    check_mixed(core, num_ids=4, windows=windows)
    assert len(deferred) > 10
    core.close()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_states_of_deferred_rows_are_the_same(late: LateService, deferred: list[int], options: dict[str, Any]) -> None:
    """A token that is computed again is once in its row's state, and so are drafts that were right."""
    backend = ScriptedBackend(num_ids=4, num_blocks=(24,), max_rows=6, context_length=80, num_snapshots=4)
    core = new_engine(backend, lambda: late, **options)
    check_mixed(core, num_ids=4, has_state=True)
    assert len(deferred) > 10
    assert core.scheduler.counts.num_preemptions > 0
    core.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_deferred_rows_may_be_preempted(late: LateService, deferred: list[int], steps_in_flight: int) -> None:
    backend = ScriptedBackend(num_blocks=(20,), max_rows=6, context_length=80)
    core = new_engine(backend, lambda: late, steps_in_flight=steps_in_flight)
    check_mixed(core)
    assert core.scheduler.counts.num_preemptions > 0
    assert len(deferred) > 10
    core.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_deferred_rows_may_leave(late: LateService, deferred: list[int], steps_in_flight: int) -> None:
    """Requests that are aborted while their masks are due; their rows serve others."""
    core = new_engine(ScriptedBackend(), lambda: late, steps_in_flight=steps_in_flight)
    left: set[str] = set()

    def disturb(step: int) -> None:
        if step < 30 and step % 3 == 2:
            name = f"leaving-{step // 3}"
            left.add(name)
            core.abort(name)

    structured, _ = GRAMMARS["regex"]
    requests = []
    for number in range(10):
        sampling = SamplingParams(temperature=1.0, seed=number, structured=structured)
        core.add(structured_request(f"leaving-{number}", [number, 2], sampling))
        requests.append(structured_request(f"staying-{number}", [number, 3], sampling))
        core.add(requests[-1])
    outputs = run_out(core, disturb)
    assert left
    assert deferred
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == alone(request)
    core.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_choices_of_one_request_are_deferred_each(late: LateService, deferred: list[int], steps_in_flight: int) -> None:
    structured, _ = GRAMMARS["regex"]
    texts: list[dict[int, list[int]]] = []
    for lateness in (lambda _row: 0, late.lateness):
        late.lateness = lateness  # type: ignore[method-assign]
        deferred.clear()
        core = new_engine(ScriptedBackend(), lambda: late, steps_in_flight=steps_in_flight)
        core.add(structured_request("n", [1, 2], SamplingParams(n=4, seed=1, structured=structured)))
        found: dict[int, list[int]] = {}
        for output in run_out(core)["n"]:
            found.setdefault(output.choice, []).extend(output.token_ids)
        texts.append(found)
        core.close()
    assert deferred
    assert texts[0] == texts[1]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_late_row_delays_nobody(late: LateService, monkeypatch: pytest.MonkeyPatch, steps_in_flight: int) -> None:
    """A row whose mask does not come for long loses steps, and a row beside it none."""
    monkeypatch.setattr(late, "lateness", lambda row: 30 if len(row.output) == 3 else 0)
    core = new_engine(ScriptedBackend(), lambda: late, steps_in_flight=steps_in_flight)
    structured, _ = GRAMMARS["regex"]
    request = structured_request("late", [1], SamplingParams(temperature=0.0, structured=structured))
    plain = Request("plain", (4, 5), SamplingParams(temperature=0), 30)
    core.add(request)
    core.add(plain)
    ends: dict[str, int] = {}
    outputs: dict[str, list[TokenOutput]] = {"late": [], "plain": []}
    for step in range(200):
        if not core.has_work:
            break
        for output in stepped(core):
            outputs[output.request_id].append(output)
            ends[output.request_id] = step
        core.audit()
    assert tokens_of(outputs["late"]) == alone(request)
    assert tokens_of(outputs["plain"]) == expected_tokens((4, 5), (None,), plain.sampling, 30)
    assert ends["plain"] <= 31
    assert ends["late"] >= len(tokens_of(outputs["late"])) + 10
    core.close()


def test_prompt_logprobs_of_a_deferred_row_come_once(late: LateService, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the step in which its prompt was read."""
    structured, _ = GRAMMARS["choice"]
    sampling = SamplingParams(temperature=0.0, structured=structured, prompt_logprobs=2, logprobs=1)
    request = structured_request("asked", [1, 2, 3, 4, 5], sampling)
    plain = Request("plain", (4, 5), SamplingParams(temperature=0), 40)
    found = []
    for lateness in (0, 2):
        monkeypatch.setattr(late, "lateness", lambda _row, lateness=lateness: lateness)
        core = new_engine(ScriptedBackend(), lambda: late, steps_in_flight=2)
        core.add(request)
        core.add(plain)
        outputs = run_out(core)["asked"]
        found.append(
            ([each for output in outputs for each in output.prompt_logprobs],
             [each for output in outputs for each in output.logprobs], tokens_of(outputs))
        )  # fmt: skip
        core.close()
    assert found[0] == found[1]
    assert len(found[0][0]) == 4


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_crash_while_masks_are_due_delays_nobody(
    service: LateService, monkeypatch: pytest.MonkeyPatch, steps_in_flight: int
) -> None:
    """The worker is replaced, and its rows followed anew, while other rows go on."""
    monkeypatch.setattr(Patience, "left_s", lambda *_: 0.0)
    real = LastingService(GRAMMAR_TOKENS)
    core = new_engine(ScriptedBackend(), lambda: real, steps_in_flight=steps_in_flight)
    requests = [
        structured_request(name, [number], SamplingParams(temperature=0.0, structured=GRAMMARS[name][0]))
        for number, name in enumerate(GRAMMARS)
    ]
    for request in requests:
        core.add(request)
    plain = Request("plain", (4, 5), SamplingParams(temperature=0), 200)
    core.add(plain)

    def disturb(step: int) -> None:
        if step in (3, 6):
            end_harmless_workers(real)

    outputs = run_out(core, disturb)
    for request in requests:
        assert tokens_of(outputs[request.request_id]) == alone(request)
    assert tokens_of(outputs["plain"]) == expected_tokens((4, 5), (None,), plain.sampling, 200)
    core.close()
    real.end()


def test_a_step_with_all_its_masks_goes_on_before_the_next_is_submitted(
    late: LateService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sampled in the call that took in the tokens before, unless a mask is late."""
    sampled: list[ScriptedStep] = []

    def sample(step: ScriptedStep) -> None:
        sampled.append(step)
        step.result()

    monkeypatch.setattr(ScriptedStep, "sample", sample)
    core = new_engine(ScriptedBackend(), lambda: late, steps_in_flight=2)
    structured, _ = GRAMMARS["regex"]
    request = structured_request("one", [1], SamplingParams(temperature=0.0, structured=structured))
    monkeypatch.setattr(late, "lateness", lambda row: 1000 if len(row.output) == 8 else 0)
    core.add(request)
    outputs: list[TokenOutput] = []
    for _ in range(30):
        before = len(sampled)
        outputs += stepped(core)
        if 1 < len(tokens_of(outputs)) < 8:
            assert [core._in_flight[0][1]] == sampled[before:]
    assert tokens_of(outputs) == alone(request)[:8]
    assert len(sampled) <= 8
    core.close()


class OnceFullBackend(ScriptedBackend):
    """Has no memory for one step. That is heard with its result: by the next step too, if `early`, else after it."""

    full_at, early = 0, False

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        step = super().submit(forward_input)
        if self.num_steps == self.full_at:
            step.__class__ = FullStep
        return step


class FullStep(ScriptedStep):
    def result(self) -> StepOutput:
        backend = self._backend
        assert isinstance(backend, OnceFullBackend)
        if backend._last is self and not backend.early:
            backend._last = None
            return super().result()
        backend._last = None
        raise CapacityError("the GPU is out of memory: tried 2 GiB")


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("full_at", range(4, 14))
def test_a_step_with_deferred_rows_may_be_given_up(late: LateService, full_at: int, early: bool) -> None:
    """Its rows start again in smaller steps, each counted once."""
    backend = OnceFullBackend(num_ids=4)
    backend.full_at, backend.early = full_at, early
    core = new_engine(backend, lambda: late, steps_in_flight=2)
    check_mixed(core, num_ids=4)
    assert backend.num_steps > full_at
    core.close()


def test_patience_lasts_for_the_share_of_the_late() -> None:
    patience = Patience()
    for number in range(200):
        patience.note(2e-3 * number)
    assert patience.left_s(0.0, 63, 64) == pytest.approx(2e-3 * 63 / 64, rel=0.01)
    assert patience.left_s(0.0, 1, 64) == pytest.approx(2e-3 / 64, rel=0.01)
    assert patience.left_s(1e-3, 16, 64) < 0
    patience.note(50.0, is_idle=True)
    patience.note(50.002)
    assert patience.left_s(0.0, 1, 1 << 20) * (1 << 20) == pytest.approx(2e-3, rel=0.01)
    patience.note(100.0)
    assert patience.left_s(0.0, 63, 64) < 0.1


def test_patience_with_rows_that_are_all_late_ends() -> None:
    """Whoever comes or leaves meanwhile waits as long."""
    patience = Patience()
    assert patience.left_s(0.0, 1, 1) == patience.left_s(0.0, 64, 64) == 0.25
    assert patience.left_s(0.3, 64, 64) < 0


def test_the_row_alone_in_its_steps_is_deferred(late: LateService, deferred: list[int]) -> None:
    core = new_engine(ScriptedBackend(), lambda: late, steps_in_flight=2)
    structured, _ = GRAMMARS["regex"]
    request = structured_request("only", [1], SamplingParams(temperature=1.0, seed=5, structured=structured))
    core.add(replace(request))
    assert tokens_of(run_out(core)["only"]) == alone(request)
    assert deferred
    core.close()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_requests_come_and_leave_while_all_masks_are_due(
    monkeypatch: pytest.MonkeyPatch, deferred: list[int], steps_in_flight: int, window: int | None
) -> None:
    """A grammar's process that stands still keeps neither a new request waiting nor one from leaving."""
    monkeypatch.setattr(Patience, "left_s", lambda *_: 0.0)
    stopped = GrammarService(GRAMMAR_TOKENS, limits=WorkerLimits(step_s=10 * HANG_S, stall_s=10 * HANG_S))
    core = new_engine(ScriptedBackend((window,)), lambda: stopped, steps_in_flight=steps_in_flight)
    sampling = SamplingParams(temperature=0.0, structured=GRAMMARS["regex"][0])
    staying = structured_request("staying", [1], sampling)
    core.add(staying)
    core.add(structured_request("leaving", [2], sampling))
    outputs: list[TokenOutput] = []
    for _ in range(3):
        outputs += stepped(core)
    pids = end_workers(stopped, signal.SIGSTOP)
    assert pids
    for _ in range(5):
        outputs += stepped(core)
    deferred.clear()
    outputs += stepped(core)
    assert deferred == [2]
    core.abort("leaving")
    plain = Request("plain", (4, 5), SamplingParams(temperature=0), 20)
    core.add(plain)
    for _ in range(25):
        outputs += stepped(core)
    assert tokens_of([each for each in outputs if each.request_id == "plain"]) == expected_tokens(
        (4, 5), (window,), plain.sampling, 20
    )
    deferred.clear()
    outputs += stepped(core)
    assert deferred == [1]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()  # else steps that sample nothing are run as fast as can be
    outputs += run_out(core)["staying"]
    assert tokens_of([each for each in outputs if each.request_id == "staying"]) == alone(staying, (window,))
    core.close()


def test_a_row_that_ended_while_it_was_held_makes_room() -> None:
    """Nobody waits for its last answer; a request with another grammar takes it in."""
    limited = GrammarService(GRAMMAR_TOKENS, limits=WorkerLimits(grammars=1, stall_s=10 * HANG_S))
    core = new_engine(ScriptedBackend(), lambda: limited, steps_in_flight=2)
    (first, _), (second, _) = GRAMMARS["regex"], GRAMMARS["choice"]
    core.add(structured_request("deferred", (1, 2), SamplingParams(structured=first)))
    core.add(Request("plain", (3, 4), SamplingParams(temperature=0.0), 20))
    for _ in range(4):
        stepped(core)
    (grammar,) = limited.known._grammars.values()
    pids = end_workers(limited, signal.SIGSTOP)
    stepped(core)
    memory = limited.rows.memory
    assert (memory.asked != memory.answered).any()
    core.abort("deferred")
    run_out(core)
    assert not grammar.num_rows
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    core.add(structured_request("next", (5, 6), SamplingParams(structured=second)))
    assert tokens_of(run_out(core)["next"])[-1] == END
    core.close()
