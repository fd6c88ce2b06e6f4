"""Planning in a process of its own: `python -m realizar.engine.process.planning`, with a question on stdin.

A server that plans many loads would otherwise have a backend's libraries in its own memory, and a GPU open, for good.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint
from realizar.engine.planned_load import PlannedLoad, plan_within
from realizar.errors import RealizarError
from realizar.ipc.error_records import ErrorRecord, record_error, restore_error


def ask_process(module: str, what: str, question: Any, answer_type: Any) -> Any:
    """Ask a module in a process of its own, which ends with its answer; its main is `answer_question`.

    It raises the RealizarError that the module raised, or one that names `what` is planned, if that process failed.
    """
    command = (sys.executable, "-m", module)
    done = subprocess.run(command, input=msgspec.json.encode(question), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RealizarError(f"{what} could not be planned: the process ended with {done.returncode}")
    answer = msgspec.json.decode(done.stdout, type=answer_type | ErrorRecord)
    if isinstance(answer, ErrorRecord):
        raise restore_error(answer)
    return answer


def answer_question(question_type: Any, answer: Callable[[Any], Any]) -> int:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=question_type)
    try:
        found = answer(question)
    except RealizarError as error:
        found = record_error(error)
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


class PlanQuestion(msgspec.Struct, frozen=True):
    """Paths of models, their configuration, and the memory that all of them may take, as `plan_within` takes it."""

    paths: tuple[str, ...]
    config: EngineConfig
    memory_bytes: int | dict[str, int] | None


class PlanAnswer(msgspec.Struct, frozen=True):
    """A model's load and the memory that it was planned for, or why it can't be loaded."""

    load: PlannedLoad | None = None
    memory_bytes: int = 0
    error: ErrorRecord | None = None

    def checked(self) -> PlannedLoad:
        """It raises RealizarError if the model can't be loaded."""
        if self.load is None:
            raise RealizarError("nothing was planned") if self.error is None else restore_error(self.error)
        return self.load


def plan_loads(
    paths: Sequence[str], config: EngineConfig, memory_bytes: int | dict[str, int] | None
) -> list[PlanAnswer]:
    """Plan the loads of models in another process. It raises RealizarError if that process failed."""
    question = PlanQuestion(tuple(paths), config, memory_bytes)
    module, what = "realizar.engine.process.planning", "the models' memory"
    answers: list[PlanAnswer] = ask_process(module, what, question, list[PlanAnswer])
    return answers


def answer_of(path: str, config: EngineConfig, memory_bytes: int | dict[str, int] | None) -> PlanAnswer:
    try:
        return PlanAnswer(*plan_within(find_checkpoint(path), config, memory_bytes))
    except RealizarError as error:
        return PlanAnswer(error=record_error(error))


def _answers(question: PlanQuestion) -> list[PlanAnswer]:
    return [answer_of(path, question.config, question.memory_bytes) for path in question.paths]


if __name__ == "__main__":
    sys.exit(answer_question(PlanQuestion, _answers))
