"""Rows with grammars in the engine, beside rows without, against a backend that says what each would get alone."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from grammar_services import LastingService
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.process.loop import EngineLoop
from realizar.engine.process.messages import Abort, Accepted, Add, Event, Outputs, Ready, Refused, Shutdown
from realizar.errors import InvalidRequestError
from realizar.request import Client, Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.structured.workers.compile_queue import Report, Ticket
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import ServerHandle, WorkerFactory, WorkerLimits
from resolving import EngineClient, new_core
from scripted_backend import ScriptedBackend, expected_tokens, make_spec
from structured.grammar_engines import (
    END,
    GRAMMAR_TOKENS,
    GRAMMARS,
    TOKENS,
    alone,
    check_mixed,
    new_engine,
    run_out,
    structured_request,
    text_of,
    tokens_of,
)
from structured.grammar_followers import end_harmless_workers
from waits import HANG_S, wait_until

SERVICE = LastingService(GRAMMAR_TOKENS)


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[GrammarService]:
    yield SERVICE
    SERVICE.end()


def make_core(
    backend: ScriptedBackend, *, new_grammars: Callable[[], GrammarService] = lambda: SERVICE, **options: Any
) -> EngineCore:
    return new_engine(backend, new_grammars, **options)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_every_row_gets_what_it_gets_alone(steps_in_flight: int) -> None:
    core = make_core(ScriptedBackend(), steps_in_flight=steps_in_flight)
    check_mixed(core)
    core.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("kills", [False, True])
def test_texts_are_the_same_where_processes_go_ahead(steps_in_flight: int, kills: bool) -> None:
    """Of tokens that the grammar forces; also if rows are preempted, or processes end meanwhile."""
    service = GrammarService(GRAMMAR_TOKENS, limits=WorkerLimits(drafts=0))
    backend = ScriptedBackend(num_blocks=(18,), max_rows=6, context_length=80)
    core = make_core(backend, new_grammars=lambda: service, steps_in_flight=steps_in_flight)

    def disturb(step: int) -> None:
        if kills and step in (5, 20):
            end_harmless_workers(service)

    check_mixed(core, disturb=disturb)
    assert core.scheduler.counts.num_preemptions > 0
    core.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_preempted_rows_go_on_in_their_grammar(steps_in_flight: int) -> None:
    backend = ScriptedBackend(num_blocks=(20,), max_rows=6, context_length=80)
    core = make_core(backend, steps_in_flight=steps_in_flight)
    check_mixed(core)
    assert core.scheduler.counts.num_preemptions > 0
    core.close()


@pytest.mark.parametrize("options", [{}, {"steps_in_flight": 2}, {"speculative_tokens": 4}], ids=str)
def test_killed_processes_change_no_text(options: dict[str, Any]) -> None:
    """All of them, in the midst of their rows, and the fork server too."""
    killed: list[int] = []

    def disturb(step: int) -> None:
        if step in (4, 9):
            killed.extend(end_harmless_workers(SERVICE))
        if step == 9 and SERVICE._factory.current is not None:
            os.kill(SERVICE._factory.current._process.pid, signal.SIGKILL)

    core = make_core(ScriptedBackend(num_ids=4), **options)
    check_mixed(core, num_ids=4, disturb=disturb)
    assert len(killed) > 1
    core.close()


def test_drafts_within_grammars() -> None:
    core = make_core(ScriptedBackend(num_ids=4), speculative_tokens=4)
    check_mixed(core, num_ids=4)
    assert core.scheduler.counts.accepted_tokens > 0
    assert core.scheduler.counts.draft_tokens > core.scheduler.counts.accepted_tokens
    core.close()


@pytest.mark.parametrize("kills", [False, True])
def test_tokens_that_a_grammar_forces_are_drafts(kills: bool) -> None:
    """Prompt lookup finds next to nothing in these texts; once one token is certain, the process tells what follows."""
    service = GrammarService(GRAMMAR_TOKENS, limits=WorkerLimits(drafts=3))
    structured = StructuredOutput("regex", "[ab]the quick brown fox[cd]jumps over it[ef]")

    def look_around(step: int) -> None:
        time.sleep(0.003)  # a backend's step; processes look ahead meanwhile
        if kills and step in (3, 6):
            end_harmless_workers(service)

    steps: list[int] = []
    backend = ScriptedBackend()
    core = make_core(backend, new_grammars=lambda: service, speculative_tokens=3)
    for number in range(200):  # until the process was soon enough
        request = structured_request(f"r{number}", [1, 2, number], SamplingParams(seed=number, structured=structured))
        before = backend.num_steps
        core.add(request)
        assert tokens_of(run_out(core, look_around)[request.request_id]) == alone(request)
        steps.append(backend.num_steps - before)
        if core.scheduler.counts.accepted_tokens >= 10 and min(steps) < 38:
            break
    core.close()
    assert min(steps) < 38  # tokens of the text, and its end
    assert core.scheduler.counts.accepted_tokens >= 10
    assert core.scheduler.counts.accepted_tokens == core.scheduler.counts.draft_tokens


def test_choices_of_one_request_follow_the_grammar_each() -> None:
    core = make_core(ScriptedBackend())
    structured, pattern = GRAMMARS["regex"]
    core.add(structured_request("n", [1, 2], SamplingParams(n=4, seed=1, structured=structured)))
    found: dict[int, list[int]] = defaultdict(list)
    for output in run_out(core)["n"]:
        found[output.choice].extend(output.token_ids)
    texts = {text_of(found[choice]) for choice in range(4)}
    assert len(texts) > 1
    assert all(re.fullmatch(pattern, text) for text in texts)
    core.close()


def test_the_end_of_a_grammar_is_the_end_whatever_the_parameters_say() -> None:
    """`ignore_eos` and `min_tokens` hold until the grammar leaves nothing but the end."""
    core = make_core(ScriptedBackend())
    short = StructuredOutput("choice", '["ab"]')
    core.add(structured_request("endless", [1], SamplingParams(ignore_eos=True, structured=short)))
    core.add(structured_request("long", [1], SamplingParams(min_tokens=40, structured=short)))
    longer = replace(short, value='["ab", "abababababab"]')
    core.add(structured_request("choosing", [1], SamplingParams(min_tokens=3, structured=longer)))
    outputs = run_out(core)
    assert text_of(tokens_of(outputs["endless"])) == "ab"
    assert text_of(tokens_of(outputs["long"])) == "ab"
    assert text_of(tokens_of(outputs["choosing"])) == "ab" * 6
    assert {output[-1].finish_reason for output in outputs.values()} == {"stop"}
    core.close()


def test_a_cut_output_is_a_beginning() -> None:
    core = make_core(ScriptedBackend())
    core.add(structured_request("cut", [5], SamplingParams(structured=GRAMMARS["choice"][0]), 5))
    outputs = run_out(core)["cut"]
    assert outputs[-1].finish_reason == "length"
    assert b"".join(TOKENS[token_id] for token_id in tokens_of(outputs)) == b"abrac"
    core.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_stuck_grammar_ends_its_request_alone(steps_in_flight: int) -> None:
    core = make_core(ScriptedBackend(), steps_in_flight=steps_in_flight)
    stuck = StructuredOutput("lark", 'start: x{1000000}\nx: "a"')
    core.add(structured_request("stuck", [1], SamplingParams(n=2, structured=stuck), 200))
    plain = Request("plain", (4, 5), SamplingParams(temperature=0), 30)
    core.add(plain)
    outputs = run_out(core)
    assert tokens_of(outputs["plain"]) == expected_tokens((4, 5), (None,), plain.sampling, 30)
    errors = [output.error for output in outputs["stuck"] if output.error]
    assert len(errors) == 1
    assert "within its grammar" in errors[0].message
    assert (errors[0].cause, errors[0].param) == ("request", "structured")
    assert outputs["stuck"][-1].error == errors[0]
    assert {TOKENS[token_id] for token_id in tokens_of(outputs["stuck"])} <= {b"a"}
    core.add(structured_request("again", [1], SamplingParams(structured=GRAMMARS["choice"][0])))
    assert run_out(core)["again"][-1].finish_reason == "stop"
    core.close()


def test_what_cannot_be_followed_is_refused_when_it_is_added() -> None:
    core = make_core(ScriptedBackend())
    impossible = SamplingParams(structured=StructuredOutput("json_schema", '{"enum": []}'))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="empty") as caught:
            core.add(structured_request("a", [1], impossible))
        assert caught.value.param == "structured"
    assert not core.has_work
    core.close()
    backend = ScriptedBackend()
    without = new_core(backend, make_spec(backend.windows), EngineConfig())
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        without.add(structured_request("a", [1], SamplingParams(structured=GRAMMARS["choice"][0])))
    without.close()


class _Letters:
    """Text of tokens that have a letter each."""

    stop_string: str | None = None
    may_stop = False
    marks = ()

    def add(self, token_ids: Sequence[int]) -> str:
        return b"".join(TOKENS[token_id] for token_id in token_ids).decode()

    def finish(self) -> str:
        return ""


def test_the_client_hears_why_a_request_failed() -> None:
    client = EngineClient(make_core(ScriptedBackend()), lambda _sampling: _Letters(), (END,))
    stuck = SamplingParams(max_tokens=200, structured=StructuredOutput("lark", 'start: x{1000000}\nx: "a"'))
    stream = client.submit([1], stuck)
    with pytest.raises(InvalidRequestError, match="within its grammar") as caught:
        stream.result()
    assert caught.value.param == "structured"
    good = client.submit([1], SamplingParams(structured=StructuredOutput("choice", '["ab"]')))
    assert good.result().outputs[0].text == "ab"
    client.close()


class _SlowService:
    """A service whose fork server starts only when it is let."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> GrammarService:
        slow = self

        class SlowFactory(WorkerFactory):
            def running(self) -> ServerHandle:
                slow.asked.set()
                assert slow.go_on.wait(HANG_S)
                return super().running()

        service = GrammarService(GRAMMAR_TOKENS)
        service._factory.__class__ = SlowFactory
        return service


def test_compiling_holds_up_nobody_else() -> None:
    """Others are answered while a grammar compiles; an abort meanwhile is heeded; a refusal comes after it."""
    slow, events = _SlowService(), []
    loop = EngineLoop(events.append)
    thread = threading.Thread(target=loop.run, args=(lambda: make_core(ScriptedBackend(), new_grammars=slow),))
    thread.start()
    names = [("good", GRAMMARS["choice"][0]), ("left", GRAMMARS["regex"][0]), ("bad", StructuredOutput("regex", "["))]
    for name, structured in names:
        loop.post(Add(structured_request(name, [1], SamplingParams(structured=structured))))
    assert slow.asked.wait(HANG_S)
    loop.post(Add(Request("plain", (1, 2), SamplingParams(temperature=0), 10)))
    wait_until(lambda: "plain" in finished(events))
    assert "good" not in finished(events)
    loop.post(Abort("left"))
    slow.go_on.set()
    wait_until(lambda: "good" in finished(events) and any(isinstance(event, Refused) for event in events))
    loop.post(Shutdown())
    thread.join(HANG_S)
    assert isinstance(events[0], Ready)
    accepted = [event.request_id for event in events if isinstance(event, Accepted)]
    assert accepted == ["plain", "good"]
    (refused,) = (event for event in events if isinstance(event, Refused))
    assert (refused.request_id, refused.error.param) == ("bad", "structured")


def test_a_request_waits_in_the_line_of_its_client() -> None:
    lines: list[str] = []

    class Service(GrammarService):
        def prepare_later(self, structured: StructuredOutput, client: str, on_done: Report) -> Ticket:
            lines.append(client)
            return super().prepare_later(structured, client, on_done)

    events: list[Event] = []
    service = Service(GRAMMAR_TOKENS)
    loop = EngineLoop(events.append)
    thread = threading.Thread(
        target=loop.run, args=(lambda: make_core(ScriptedBackend(), new_grammars=lambda: service),)
    )
    thread.start()
    for client, grammar in (("somebody", "choice"), ("", "schema")):
        request = structured_request(client or "nobody", [1], SamplingParams(structured=GRAMMARS[grammar][0]))
        loop.post(Add(replace(request, client=Client(client))))
    wait_until(lambda: finished(events) == {"somebody", "nobody"})
    loop.post(Shutdown())
    thread.join(HANG_S)
    assert lines == ["somebody", ""]


def finished(events: Sequence[Event]) -> set[str]:
    steps = [event.deltas for event in events if isinstance(event, Outputs)]
    names = {start.number: start.request_id for deltas in steps for start in deltas.starts}
    return {names[end.number] for deltas in steps for end in deltas.ends}
