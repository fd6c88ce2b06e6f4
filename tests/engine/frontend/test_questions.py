"""`Questions`: each gets its own answer, an error or none in time, and what comes late is nobody's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from realizar.engine.frontend.questions import Questions, send_reply
from realizar.engine.process.messages import Ask, Reply
from realizar.errors import CapacityError, EngineDeadError, RealizarError
from realizar.ipc.error_records import record_error
from waits import HANG_S


def play(main: Callable[[Questions, list[Ask]], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        sent: list[Ask] = []
        questions = Questions(sent.append)
        await asyncio.wait_for(main(questions, sent), HANG_S)
        assert not questions._open

    asyncio.run(run())


def test_each_question_gets_its_own_answer() -> None:
    async def main(questions: Questions, sent: list[Ask]) -> None:
        asked = [asyncio.create_task(questions.ask(what)) for what in ("audit", "sleep", "stats")]
        await asyncio.sleep(0)
        assert [ask.what for ask in sent] == ["audit", "sleep", "stats"]
        questions.resolve(Reply(sent[1].number, error=record_error(CapacityError("no room"))))
        questions.resolve(Reply(sent[0].number, "a block is lost"))
        questions.resolve(Reply(sent[0].number, "again"))
        assert await asked[0] == "a block is lost"
        with pytest.raises(CapacityError, match="no room"):
            await asked[1]
        questions.fail(EngineDeadError("it is gone"))
        with pytest.raises(EngineDeadError, match="it is gone"):
            await asked[2]

    play(main)


def test_a_question_without_an_answer_in_time_is_forgotten() -> None:
    async def main(questions: Questions, sent: list[Ask]) -> None:
        with pytest.raises(TimeoutError):
            await questions.ask("stats", 0.0)
        task = asyncio.create_task(questions.ask("stats"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        for ask in sent:
            questions.resolve(Reply(ask.number, "late"))

    play(main)


def test_one_that_could_not_be_asked_is_forgotten() -> None:
    def refuse(ask: Ask) -> None:
        raise RealizarError("too large")

    questions = Questions(refuse)
    with pytest.raises(RealizarError, match="too large"):
        asyncio.run(questions.ask("stats"))
    assert not questions._open


@pytest.mark.parametrize("error", [CapacityError("no room"), ZeroDivisionError("a fault")])
def test_an_error_is_part_of_the_answer(error: Exception) -> None:
    async def fail() -> None:
        raise error

    answers: list[Reply[Any]] = []
    asyncio.run(send_reply(Ask(3, "audit"), fail(), answers.append))
    (answer,) = answers
    assert (answer.number, answer.value, answer.error) == (3, None, record_error(error))
