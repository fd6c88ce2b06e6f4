"""`OpenRequests` on steps that are written by hand."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from number_text import NumberText
from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.open_requests import OpenRequests
from realizar.engine.frontend.outputs import ChoiceDelta
from realizar.engine.process.messages import Abort, Add
from realizar.errors import EngineDeadError, InvalidRequestError, RequestFailedError
from realizar.logprob_columns import LogprobColumns
from realizar.outputs import RowError, TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import ChoiceEnd, ChoiceStart, RequestFailure, StepDeltas, StepLogprobs


class Client:
    """Requests that the engine has queued, and what is sent to it."""

    def __init__(self) -> None:
        self.sent: list[Add | Abort] = []
        self.requests = OpenRequests(NumberText, self.sent.append, lambda: None, keeps_logprobs=True)
        self.streams: dict[str, AsyncStream] = {}

    async def add(self, name: str, **sampling: Any) -> None:
        request = Request(name, (1, 2), SamplingParams(**sampling), 9)
        submitting = asyncio.create_task(self.requests.submit(request, None, keep_deltas=True))
        await asyncio.sleep(0)
        self.requests.answer(name, None)
        self.streams[name] = await submitting

    def take_deltas(self) -> list[ChoiceDelta | None]:
        sources = [source for stream in self.streams.values() for source in stream._news]
        for stream in self.streams.values():
            stream._news.clear()
        return [take_delta() for take_delta in sources]

    @property
    def aborts(self) -> list[Abort]:
        return [command for command in self.sent if isinstance(command, Abort)]

    def error(self, name: str) -> BaseException | None:
        end = self.streams[name]._end
        return end.exception() if end.done() else None


def play(main: Callable[[Client], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await main(Client())

    asyncio.run(run())


def step(rows: Sequence[tuple[int, Sequence[int]]], at_s: float = 1.0, **lists: Any) -> StepDeltas:
    """A step by rows: a number and its tokens."""
    numbers = array("q", [number for number, tokens in rows for _ in tokens])
    token_ids = array("i", [token for _, tokens in rows for token in tokens])
    return StepDeltas(at_s, numbers.tobytes(), token_ids.tobytes(), **lists)


def logprobs(number: int, entries: Sequence[TokenLogprobs]) -> StepLogprobs:
    return StepLogprobs(array("q", [number] * len(entries)).tobytes(), LogprobColumns.of(entries))


def test_a_late_consumer_gets_one_delta_with_all_steps_in_order() -> None:
    async def main(client: Client) -> None:
        await client.add("a")
        await client.add("b")
        starts = (ChoiceStart(7, "a", 0, 0.5, 1), ChoiceStart(8, "b", 0, 0.6))
        client.requests.take_in(step([(7, [1]), (8, [50])], starts=starts))
        client.requests.take_in(step([(8, [51, 52]), (7, [2])], 2.0))
        client.requests.take_in(step([(7, [3])], 3.0))
        assert [len(stream._news) for stream in client.streams.values()] == [1, 1]
        first, second = client.take_deltas()
        assert first == ChoiceDelta("a", 0, "1 2 3", (1, 2, 3), num_cached_tokens=1)  # a character is held back
        assert second == ChoiceDelta("b", 0, "50 51 52", (50, 51, 52))
        client.requests.take_in(step([(7, [4]), (7, [5])], 4.0, ends=(ChoiceEnd(7, "length"),)))
        assert client.take_deltas() == [ChoiceDelta("a", 0, " 4 5 ", (4, 5), (), "length", None, 1)]
        output = await client.streams["a"].result()
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("1 2 3 4 5 ", (1, 2, 3, 4, 5))
        assert (output.timings.scheduled_s, output.timings.first_token_s, output.timings.finished_s) == (0.5, 1.0, 4.0)
        assert client.aborts == []

    play(main)


def test_a_stop_string_ends_a_choice_inside_a_step_though_nobody_reads() -> None:
    async def main(client: Client) -> None:
        await client.add("a", stop=("3 ",), logprobs=1)
        entries = tuple(TokenLogprobs(token, -1.0, 1, ()) for token in (1, 2, 3, 4, 5))
        deltas = step([(0, [1, 2, 3, 4, 5])], starts=(ChoiceStart(0, "a", 0, 0.5),), logprobs=(logprobs(0, entries),))
        client.requests.take_in(deltas)
        client.requests.take_in(step([(0, [6])], ends=(ChoiceEnd(0, "length"),)))  # the abort has not arrived yet
        assert client.aborts == [Abort("a", 0)]
        assert client.take_deltas() == [ChoiceDelta("a", 0, "1 2 ", (1, 2, 3), entries[:3], "stop", "3 ")]
        output = await client.streams["a"].result()
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == ((1, 2, 3), entries[:3])

    play(main)


def test_a_stop_token_has_no_text_and_is_the_last_token() -> None:
    async def main(client: Client) -> None:
        await client.add("a")
        client.requests.take_in(step([(0, [1])], starts=(ChoiceStart(0, "a", 0, 0.5),)))
        client.requests.take_in(step([(0, [2, 60])], ends=(ChoiceEnd(0, "stop", 60),)))
        assert client.take_deltas() == [ChoiceDelta("a", 0, "1 2 ", (1, 2, 60), (), "stop", 60)]

    play(main)


def test_a_failure_is_known_by_any_choice_even_one_that_has_ended() -> None:
    async def main(client: Client) -> None:
        await client.add("a", n=2, stop=("1 ",))
        starts = (ChoiceStart(3, "a", 0, 0.5), ChoiceStart(4, "a", 1, 0.5))
        client.requests.take_in(step([(3, [1]), (4, [2])], starts=starts))
        assert client.aborts == [Abort("a", 0)]
        client.requests.take_in(step([], failures=(RequestFailure(3, RowError("no such thing", "request", "seed")),)))
        error = client.error("a")
        assert (type(error), str(error)) == (InvalidRequestError, "no such thing")
        client.requests.take_in(step([(4, [2])], failures=(RequestFailure(4, RowError("late")),)))
        assert client.error("a") is error

    play(main)


def test_a_request_may_fail_before_anything_else_of_it_came() -> None:
    async def main(client: Client) -> None:
        await client.add("a")
        failure = RequestFailure(5, RowError("the kernel failed"))
        client.requests.take_in(step([], starts=(ChoiceStart(5, "a", 0, 0.5),), failures=(failure,)))
        assert isinstance(client.error("a"), RequestFailedError)

    play(main)


@pytest.mark.parametrize("stop", [("?",), ("?", "x")])
def test_a_text_that_fails_ends_its_request_alone(stop: tuple[str, ...]) -> None:
    async def main(client: Client) -> None:
        await client.add("bad", stop=stop)
        await client.add("good")
        starts = (ChoiceStart(0, "bad", 0, 0.5), ChoiceStart(1, "good", 0, 0.5))
        client.requests.take_in(step([(0, [1]), (1, [1])], starts=starts))
        client.requests.take_in(step([(0, [2]), (1, [2])]))
        assert isinstance(client.error("bad"), RequestFailedError)
        assert (client.error("good"), client.aborts) == (None, [Abort("bad")])
        del client.streams["bad"]
        assert client.take_deltas() == [ChoiceDelta("good", 0, "1 2", (1, 2))]

    play(main)


def test_a_text_that_fails_when_it_is_read_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(client: Client) -> None:
        await client.add("bad")
        client.requests.take_in(step([(0, [1])], starts=(ChoiceStart(0, "bad", 0, 0.5),)))
        monkeypatch.setattr(NumberText, "add", lambda self, token_ids: 1 // 0)
        assert client.take_deltas() == [None]
        assert isinstance(client.error("bad"), RequestFailedError)
        client.requests.take_in(step([(0, [2])]))
        assert client.take_deltas() == []

    play(main)


def test_deltas_of_discarded_requests_and_of_another_engine_are_passed_over() -> None:
    async def main(client: Client) -> None:
        await client.add("a")
        client.requests.take_in(step([(0, [1])], starts=(ChoiceStart(0, "a", 0, 0.5),)))
        client.streams["a"].close()
        client.requests.take_in(step([(0, [2])], ends=(ChoiceEnd(0, "length"),)))
        client.requests.take_in(step([(1, [2])], starts=(ChoiceStart(1, "unknown", 0, 0.5),)))
        await client.add("c")
        client.requests.fail(EngineDeadError("gone"))
        await client.add("b")
        client.requests.take_in(step([(0, [9])], starts=(ChoiceStart(0, "b", 0, 0.5),)))
        assert [delta and (delta.request_id, delta.token_ids) for delta in client.take_deltas()] == [
            ("a", (1,)),
            ("b", (9,)),
        ]
        assert client.error("b") is None
        assert not client.streams["b"].done

    play(main)


def test_a_prompt_that_is_scored_is_known_by_a_delta_without_tokens() -> None:
    async def main(client: Client) -> None:
        await client.add("a", prompt_logprobs=1)
        entry = TokenLogprobs(2, -1.0, 1, ())
        scored = (logprobs(0, (entry,)),)
        client.requests.take_in(step([], starts=(ChoiceStart(0, "a", 0, 0.5),), prompt_logprobs=scored))
        assert client.take_deltas() == [ChoiceDelta("a", 0, "", ())]
        client.requests.take_in(step([(0, [3])], 2.0, ends=(ChoiceEnd(0, "length"),)))
        output = await client.streams["a"].result()
        assert (output.prompt_logprobs, output.timings.first_token_s) == ((None, entry), 2.0)

    play(main)
