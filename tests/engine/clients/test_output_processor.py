"""`OutputProcessor` on steps that are written by hand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from number_text import NumberText
from realizar.engine.clients.growing_choice import GrowingChoice
from realizar.engine.clients.output_processor import OutputProcessor
from realizar.errors import InvalidRequestError, RealizarError, RequestFailedError
from realizar.logprob_columns import LogprobColumns
from realizar.outputs import ChoiceDelta, RequestOutput, RowError, TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import ChoiceEnd, ChoiceStart, RequestFailure, StepDeltas, StepLogprobs


class Listener:
    """Notes the choices that are reported to it, and discards what failed, as clients do."""

    def __init__(self) -> None:
        self.processor = OutputProcessor(NumberText, self)
        self.ended: list[tuple[str, int, str | int | None]] = []
        self.outputs: list[RequestOutput] = []
        self.errors: list[tuple[str, RealizarError | None]] = []
        self.noted: list[GrowingChoice] = []

    def add(self, name: str, **sampling: Any) -> None:
        self.processor.add(Request(name, (1, 2), SamplingParams(**sampling), 9), None, self.noted.append)

    def choice_ended(self, choice: GrowingChoice) -> None:
        self.ended.append((choice.request_id, choice.index, choice.stop_reason))

    def request_ended(self, output: RequestOutput, last: GrowingChoice) -> None:
        self.outputs.append(output)

    def request_failed(self, request_id: str, error: RealizarError) -> None:
        self.errors.append((request_id, error))

    def text_failed(self, request_id: str) -> None:
        self.errors.append((request_id, None))
        self.processor.discard(request_id)

    def take_deltas(self) -> list[ChoiceDelta | None]:
        noted, self.noted[:] = list(self.noted), []
        return [choice.take_delta() for choice in noted]


def step(rows: Sequence[tuple[int, Sequence[int]]], at_s: float = 1.0, **lists: Any) -> StepDeltas:
    """A step by rows: a number and its tokens."""
    counts = array("i", [len(tokens) for _, tokens in rows])
    return StepDeltas(
        at_s,
        array("q", [number for number, _ in rows]).tobytes(),
        b"" if all(count == 1 for count in counts) else counts.tobytes(),
        array("i", [token for _, tokens in rows for token in tokens]).tobytes(),
        **lists,
    )


def logprobs(number: int, entries: Sequence[TokenLogprobs]) -> StepLogprobs:
    return StepLogprobs(array("q", [number] * len(entries)).tobytes(), LogprobColumns.of(entries))


def test_a_late_consumer_gets_one_delta_with_all_steps_in_order() -> None:
    client = Listener()
    client.add("a")
    client.add("b")
    starts = (ChoiceStart(7, "a", 0, 0.5, 1), ChoiceStart(8, "b", 0, 0.6))
    client.processor.take_in(step([(7, [1]), (8, [50])], starts=starts))
    client.processor.take_in(step([(8, [51, 52]), (7, [2])], 2.0))
    client.processor.take_in(step([(7, [3])], 3.0))
    assert [choice.request_id for choice in client.noted] == ["a", "b"]
    first, second = client.take_deltas()
    assert first == ChoiceDelta("a", 0, "1 2 3", (1, 2, 3), num_cached_tokens=1)  # a character is held back
    assert second == ChoiceDelta("b", 0, "50 51 52", (50, 51, 52))
    client.processor.take_in(step([(7, [4]), (7, [5])], 4.0, ends=(ChoiceEnd(7, "length"),)))
    assert client.take_deltas() == [ChoiceDelta("a", 0, " 4 5 ", (4, 5), (), "length", None, 1)]
    (output,) = client.outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("1 2 3 4 5 ", (1, 2, 3, 4, 5))
    assert (output.timings.scheduled_s, output.timings.first_token_s, output.timings.finished_s) == (0.5, 1.0, 4.0)
    assert client.ended == [("a", 0, None)]


def test_a_stop_string_ends_a_choice_inside_a_step_though_nobody_reads() -> None:
    client = Listener()
    client.add("a", stop=("3 ",), logprobs=1)
    entries = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in (1, 2, 3, 4, 5))
    deltas = step([(0, [1, 2, 3, 4, 5])], starts=(ChoiceStart(0, "a", 0, 0.5),), logprobs=(logprobs(0, entries),))
    client.processor.take_in(deltas)
    client.processor.take_in(step([(0, [6])], ends=(ChoiceEnd(0, "length"),)))  # the abort has not arrived yet
    assert client.ended == [("a", 0, "3 ")]
    assert client.take_deltas() == [ChoiceDelta("a", 0, "1 2 ", (1, 2, 3), entries[:3], "stop", "3 ")]
    (output,) = client.outputs
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == ((1, 2, 3), entries[:3])


def test_a_stop_token_has_no_text_and_is_the_last_token() -> None:
    client = Listener()
    client.add("a")
    client.processor.take_in(step([(0, [1])], starts=(ChoiceStart(0, "a", 0, 0.5),)))
    client.processor.take_in(step([(0, [2, 60])], ends=(ChoiceEnd(0, "stop", 60),)))
    assert client.take_deltas() == [ChoiceDelta("a", 0, "1 2 ", (1, 2, 60), (), "stop", 60)]


def test_a_failure_is_known_by_any_choice_even_one_that_has_ended() -> None:
    client = Listener()
    client.add("a", n=2, stop=("1 ",))
    starts = (ChoiceStart(3, "a", 0, 0.5), ChoiceStart(4, "a", 1, 0.5))
    client.processor.take_in(step([(3, [1]), (4, [2])], starts=starts))
    assert client.ended == [("a", 0, "1 ")]
    client.processor.take_in(step([], failures=(RequestFailure(3, RowError("no such thing", "request", "seed")),)))
    ((name, error),) = client.errors
    assert (name, str(error)) == ("a", "no such thing")
    assert isinstance(error, InvalidRequestError)
    client.processor.take_in(step([(4, [2])], failures=(RequestFailure(4, RowError("late")),)))
    assert len(client.errors) == 1


def test_a_request_may_fail_before_anything_else_of_it_came() -> None:
    client = Listener()
    client.add("a")
    failure = RequestFailure(5, RowError("the kernel failed"))
    client.processor.take_in(step([], starts=(ChoiceStart(5, "a", 0, 0.5),), failures=(failure,)))
    ((name, error),) = client.errors
    assert (name, type(error)) == ("a", RequestFailedError)


@pytest.mark.parametrize("stop", [("?",), ("?", "x")])
def test_a_text_that_fails_ends_its_request_alone(stop: tuple[str, ...]) -> None:
    client = Listener()
    client.add("bad", stop=stop)
    client.add("good")
    starts = (ChoiceStart(0, "bad", 0, 0.5), ChoiceStart(1, "good", 0, 0.5))
    client.processor.take_in(step([(0, [1]), (1, [1])], starts=starts))
    client.processor.take_in(step([(0, [2]), (1, [2])]))
    assert client.errors == [("bad", None)]
    assert client.take_deltas() == [ChoiceDelta("good", 0, "1 2", (1, 2))]


def test_a_text_that_fails_when_it_is_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Listener()
    client.add("bad")
    client.processor.take_in(step([(0, [1])], starts=(ChoiceStart(0, "bad", 0, 0.5),)))
    monkeypatch.setattr(NumberText, "add", lambda self, token_ids: 1 // 0)
    assert client.take_deltas() == [None]
    assert client.errors == [("bad", None)]
    client.processor.take_in(step([(0, [2])]))
    assert client.noted == []


def test_deltas_of_discarded_requests_and_of_another_engine_are_passed_over() -> None:
    client = Listener()
    client.add("a")
    client.processor.take_in(step([(0, [1])], starts=(ChoiceStart(0, "a", 0, 0.5),)))
    client.processor.discard("a")
    client.processor.take_in(step([(0, [2])], ends=(ChoiceEnd(0, "length"),)))
    client.processor.take_in(step([(1, [2])], starts=(ChoiceStart(1, "unknown", 0, 0.5),)))
    client.processor.discard_all()
    client.add("b")
    client.processor.take_in(step([(0, [9])], starts=(ChoiceStart(0, "b", 0, 0.5),)))
    assert [delta and (delta.request_id, delta.token_ids) for delta in client.take_deltas()] == [
        ("a", (1,)),
        ("b", (9,)),
    ]
    assert client.outputs == []


def test_a_prompt_that_is_scored_is_known_by_a_delta_without_tokens() -> None:
    client = Listener()
    client.add("a", prompt_logprobs=1)
    entry = TokenLogprobs(2, -1.0, 1, ())
    scored = (logprobs(0, (entry,)),)
    client.processor.take_in(step([], starts=(ChoiceStart(0, "a", 0, 0.5),), prompt_logprobs=scored))
    assert client.take_deltas() == [ChoiceDelta("a", 0, "", ())]
    client.processor.take_in(step([(0, [3])], 2.0, ends=(ChoiceEnd(0, "length"),)))
    assert client.outputs[0].prompt_logprobs == (None, entry)
    assert client.outputs[0].timings.first_token_s == 2.0
