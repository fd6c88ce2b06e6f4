"""Requests alone and beside others: an engine that keeps them apart passes, and whatever mixes them up is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from check_invariance import (
    Crowd,
    Difference,
    Subject,
    SubjectWork,
    draw_subject,
    find_difference,
    run_alone,
    run_beside,
)

from realizar.bench.serve.kinds import KINDS
from realizar.bench.serve.workload import Lengths
from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint, load_core
from realizar.errors import QueueFullError
from realizar.outputs import RowError
from realizar.step_deltas import StepDeltas
from resolving import new_core
from scripted_backend import VOCAB_SIZE, ScriptedBackend, make_spec
from step_inputs import DeltaWriter, TokenOutput, stepped

WITHOUT_GRAMMARS = tuple(kind for kind in KINDS if kind not in ("regex", "json-schema", "tools"))
WORK = SubjectWork(VOCAB_SIZE, Lengths(2, 30), Lengths(6, 12), WITHOUT_GRAMMARS)
CROWD = Crowd(open_at_once=6, leave_share=0.4)


def make_core() -> Any:
    backend = ScriptedBackend(num_blocks=(20,))
    return new_core(backend, make_spec((None,)), EngineConfig(), steps_in_flight=2)


def differences(core: Any, count: int = 26) -> list[Difference]:
    subjects = [draw_subject(WORK, number) for number in range(count)]
    alone = run_alone(core, subjects, str)
    beside = run_beside(core, subjects, WORK, CROWD, str)
    assert len(beside) == len(alone) == count
    found = [find_difference(each, alone[each.name], beside[each.name]) for each in subjects]
    return [difference for difference in found if difference is not None]


def test_an_engine_that_keeps_requests_apart() -> None:
    """With little memory: blocks are shared and given up, and requests in between are aborted."""
    core = make_core()
    assert differences(core) == []
    assert core.scheduler.counts.num_preemptions > 0
    assert core.scheduler.counts.prefix_cache_hits > 0
    core.audit()
    assert not core.has_work


class Faulty:
    """An engine whose outputs are changed while more than one request is open."""

    def __init__(self, change: Callable[[TokenOutput, int], None]) -> None:
        self._core, self._change = make_core(), change
        self._made: dict[tuple[str, int], int] = {}
        self._open: set[str] = set()
        self._writer = DeltaWriter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def add(self, request: Any) -> None:
        self._core.add(request)
        self._open.add(request.request_id)
        self._made.update({(request.request_id, choice): 0 for choice in range(request.sampling.n)})

    def step(self) -> StepDeltas:
        outputs = stepped(self._core)
        crowded = len(self._open) > 1
        for output in outputs:
            made = self._made[output.request_id, output.choice]
            if crowded:
                self._change(output, made)
            self._made[output.request_id, output.choice] = made + len(output.token_ids)
            if output.finish_reason is not None and output.choice == 0:
                self._open.discard(output.request_id)
        return self._writer.deltas(outputs)


VICTIM = "logprobs 9"


def changed(**fields: Callable[[TokenOutput], Any]) -> Callable[[TokenOutput, int], None]:
    """A fault that the victim's third token meets."""

    def change(output: TokenOutput, made: int) -> None:
        if output.request_id == VICTIM and made == 2:
            for name, value in fields.items():
                setattr(output, name, value(output))

    return change


def test_a_token_that_differs_is_found_with_its_place() -> None:
    (found,) = differences(Faulty(changed(token_ids=lambda output: (output.token_ids[0] ^ 1,))))
    assert (found.subject.name, found.what, found.position, found.choice) == (VICTIM, "token", 2, 0)
    assert int(found.alone) == int(found.beside) ^ 1
    assert found.step is not None
    assert found.step.kinds["logprobs"] >= 1
    assert "logprobs 9, prompt of" in str(found)
    assert "choices got tokens" in str(found)


def test_the_last_bit_of_a_log_probability_counts() -> None:
    def nudged(output: TokenOutput) -> Any:
        (first,) = output.logprobs
        top = (*first.top[:-1], (first.top[-1][0], first.top[-1][1] * (1 + 2**-52)))
        return (first._replace(top=top),)

    (found,) = differences(Faulty(changed(logprobs=nudged)))
    assert (found.subject.name, found.what, found.position) == (VICTIM, "log-probability", 2)
    assert found.alone != found.beside


def test_an_error_or_another_end_is_a_difference() -> None:
    (found,) = differences(Faulty(changed(error=lambda output: RowError("the sum is NaN"))))
    assert (found.what, found.position) == ("end", 2)
    assert "error: the sum is NaN after 2 tokens" in str(found)
    assert found.step is None


def test_a_full_queue_is_waited_for() -> None:
    core = make_core()
    add, refusals = core.add, itertools.count()

    def busy(request: Any) -> None:
        if core.scheduler.counts.num_running + core.scheduler.counts.num_waiting > 1:
            next(refusals)
            raise QueueFullError("full", 1.0)
        add(request)

    core.add = busy
    assert differences(core, 6) == []
    assert next(refusals) > 0


def test_a_real_engine_follows_grammars_beside_others(smollm2_path: Path) -> None:
    """On a CPU a request's bits are the same in every batch, those of grammars, choices and penalties too."""
    core = load_core(find_checkpoint(smollm2_path), EngineConfig(threads=2, context_length=128, max_running=6))
    try:
        kinds = ("regex", "json-schema", "tools", "dry", "choices")
        work = SubjectWork(core.spec.vocab_size, Lengths(2, 40), Lengths(3, 6), kinds)
        subjects = [draw_subject(work, number) for number in range(len(kinds))]
        alone = run_alone(core, subjects, str)
        beside = run_beside(core, subjects, work, CROWD, str)
        assert [find_difference(each, alone[each.name], beside[each.name]) for each in subjects] == [None] * 5
        assert all(
            len(choice.tokens) > 1 and choice.end == "length" for seen in alone.values() for choice in seen.values()
        )
        assert core.cache.counts[0].used == 0
    finally:
        core.close()


def test_requests_are_drawn_from_the_seed() -> None:
    drawn: list[Subject] = [draw_subject(WORK, number) for number in range(200)]
    assert drawn == [draw_subject(WORK, number) for number in range(200)]
    assert {subject.kind for subject in drawn} == set(WITHOUT_GRAMMARS)
    with_logprobs = sum(subject.sampling.logprobs is not None for subject in drawn)
    assert with_logprobs / 200 == pytest.approx(0.55, abs=0.12)
    assert {len(subject.prompt) for subject in drawn} == set(range(2, 31))
    starts = [subject.prompt[:20] for subject in drawn if len(subject.prompt) > 21]
    assert len(set(starts)) < len(starts), "some begin alike"
    every = SubjectWork(40_000, Lengths(2, 30), Lengths(6, 12))
    structured = {s.kind for s in (draw_subject(every, n) for n in range(16)) if s.sampling.structured is not None}
    assert structured == {"regex", "json-schema", "tools"}
