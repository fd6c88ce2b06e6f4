"""The loop around the core, without a process: what it does with its idle time, and what it loads."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.process import main as process
from realizar.engine.process.loop import EngineLoop
from realizar.engine.process.main import EngineProcess
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Event,
    Failed,
    Load,
    Outputs,
    Refused,
    Reply,
    Shutdown,
)
from realizar.engine.stats import EngineStats
from realizar.ipc.frames import FrameReader
from realizar.outputs import RowError, TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import RequestFailure, StepDeltas
from resolving import new_core
from scripted_backend import ScriptedBackend, expected_tokens, make_spec
from step_inputs import DeltaWriter, TokenOutput
from waits import HANG_S

GREEDY = SamplingParams(temperature=0.0)


def test_an_idle_engine_audits_itself_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each idle time has one audit, which reports a lost block once.

    The engine is idle as soon as it has nothing to do. It answers a question after all that it had to do before.
    """
    monkeypatch.setattr("realizar.engine.process.loop._IDLE_S", 0.0)
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig())
    audited, answered = threading.Semaphore(0), threading.Semaphore(0)
    honest = core.audit

    def audit() -> None:
        audited.release()
        honest()

    monkeypatch.setattr(core, "audit", audit)
    loop = EngineLoop(lambda event: answered.release() if isinstance(event, Reply) else None)
    thread = threading.Thread(target=loop.run, args=(lambda: core,))
    thread.start()
    try:
        for number in range(2):
            loop.post(Add(Request(str(number), (number, 5), GREEDY, 1)))
            assert audited.acquire(timeout=HANG_S)
            for _ in range(3):
                loop.post(Ask(number, "stats"))
                assert answered.acquire(timeout=HANG_S)
            assert not audited.acquire(blocking=False)
            assert ("block audit found a fault" in caplog.text) is (number > 0)
            core.cache._groups[0].pool._free.pop()
    finally:
        loop.post(Shutdown())
        thread.join(HANG_S)


def test_what_is_loaded_is_kept_from_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(process.gc, "freeze", lambda: frozen.append(1))
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig())
    monkeypatch.setattr(core.grammars, "read_vocabulary", lambda: None)
    monkeypatch.setattr(process, "find_checkpoint", lambda _: None)
    monkeypatch.setattr(process, "load_core", lambda *_, **__: core)
    assert process.load_model(Load("model", EngineConfig()), lambda *_: None) is core
    assert frozen == [1]


def test_any_error_of_the_loop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a report, callers that wait for an engine on a thread would wait for ever."""
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig())
    monkeypatch.setattr(core, "abort", lambda *_: 1 // 0)
    events: list[Event] = []
    loop = EngineLoop(events.append)
    loop.post(Abort("a"))
    loop.run(lambda: core)
    assert isinstance(events[-1], Failed)
    assert events[-1].error.kind == "EngineDeadError"
    assert "ZeroDivisionError" in events[-1].error.message


def test_memory_that_does_not_suffice_for_a_load_is_no_fault_of_the_program(caplog: pytest.LogCaptureFixture) -> None:
    def load() -> EngineCore:
        raise MemoryError("Unable to allocate 8.00 GiB")

    events: list[Event] = []
    EngineLoop(events.append).run(load)
    assert isinstance(events[-1], Failed)
    assert (events[-1].error.kind, "8.00 GiB" in events[-1].error.message) == ("CapacityError", True)
    assert "Traceback" not in caplog.text


def test_a_request_that_can_not_be_queued_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig())
    honest = core.add
    monkeypatch.setattr(core, "add", lambda request: 1 // 0 if request.request_id == "bad" else honest(request))
    events: list[Event] = []
    loop = EngineLoop(events.append)
    for name in ("bad", "good"):
        loop.post(Add(Request(name, (1, 2), GREEDY, 1)))
    loop.post(Shutdown())
    loop.run(lambda: core)
    refused = [event.request_id for event in events if isinstance(event, Refused)]
    assert refused == ["bad"]
    assert [event.request_id for event in events if isinstance(event, Accepted)] == ["good"]


def test_results_too_large_to_be_sent_end_their_request_alone() -> None:
    """Choices are sent one by one where all together are too large; one that is too large alone ends its request."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine = EngineProcess(theirs, max_frame_bytes=4000)
        logprobs = tuple(TokenLogprobs(1, -1.0, 1, ()) for _ in range(1000))
        names = ["0", "large", "1", "2"]
        outputs = [TokenOutput(name, 0, (at,), 0.0, 0.0, logprobs=logprobs[:50]) for at, name in enumerate(names)]
        outputs[1].prompt_logprobs = logprobs
        engine._report(Outputs(DeltaWriter().deltas(outputs)))
        theirs.shutdown(socket.SHUT_WR)
        reader: FrameReader[Event] = FrameReader(Event)
        found: list[StepDeltas] = []
        while data := ours.recv(65536):
            for event in reader.feed(data):
                assert isinstance(event, Outputs)
                found.append(event.deltas)
    tokens = {part.starts[0].request_id: part.token_list() for part in found if not part.failures}
    assert tokens == {"0": [0], "1": [2], "2": [3]}
    assert all(len(part.logprobs[0].entries) == 50 for part in found if not part.failures)
    (failed,) = [part for part in found if part.failures]
    assert failed.starts[0].request_id == "large"
    error = RowError("a step's results for the request are too large to be sent", "request")
    assert failed.failures == (RequestFailure(failed.starts[0].number, error),)


def test_a_request_whose_results_could_not_be_sent_ends_in_the_engine() -> None:
    """The engine's next answer is that the other request runs alone."""
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig())
    answers: list[EngineStats] = []

    def report(event: Event) -> None:
        if isinstance(event, Reply):
            answers.append(event.value)
        elif isinstance(event, Outputs) and event.deltas.starts:
            number = next(start.number for start in event.deltas.starts if start.request_id == "b")
            loop.abort_unsent(number)
            loop.abort_unsent(number)  # the second finds it ended
            loop.post(Ask(0, "stats"))
            loop.post(Shutdown())

    loop = EngineLoop(report)
    for name in ("a", "b"):
        loop.post(Add(Request(name, (1, 2), GREEDY, 50)))
    loop.run(lambda: core)
    assert [answer.num_running for answer in answers] == [1]


def test_a_choice_that_ended_in_the_step_that_could_not_be_sent_ends_its_request() -> None:
    sampling = SamplingParams(seed=5, n=2)
    first, second = (expected_tokens([1, 2], (None,), sampling, 50, choice) for choice in range(2))
    stop = next(token for token in first if token not in second)
    core = new_core(ScriptedBackend(), make_spec((None,)), EngineConfig())
    answers: list[EngineStats] = []

    def report(event: Event) -> None:
        if isinstance(event, Reply):
            answers.append(event.value)
        elif isinstance(event, Outputs) and event.deltas.ends and not answers:
            (end,) = event.deltas.ends
            assert end.stop_token_id == stop
            loop.abort_unsent(end.number)
            loop.post(Ask(0, "stats"))
            loop.post(Shutdown())

    loop = EngineLoop(report)
    loop.post(Add(Request("a", (1, 2), replace(sampling, stop_token_ids=(stop,)), 50)))
    loop.run(lambda: core)
    assert [(answer.num_running, answer.num_used_blocks) for answer in answers] == [(0, 0)]


def test_the_prompt_of_a_request_that_fails_is_counted_and_forgotten() -> None:
    loop = EngineLoop(lambda event: None)
    loop._prompts["a"] = 5
    loop._count(DeltaWriter().deltas([TokenOutput("a", 0, (), 0.0, 0.0, error=RowError("no"))]))
    assert (loop._prompts, loop._prompt_tokens) == ({}, 5)
