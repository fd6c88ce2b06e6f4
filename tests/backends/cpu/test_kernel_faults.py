"""A compiled kernel that raises, on any thread: the walk raises it, and the requests of that step alone end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numba import cfunc, types

from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.memory import view
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.cpu.threads import KernelFaults, ThreadTeam
from realizar.backends.cpu.walker import OPERATION_FIELDS
from realizar.config import EngineConfig
from realizar.errors import StepError
from realizar.outputs import RowError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from resolving import new_core, resolved
from step_inputs import TokenOutput, stepped

GREEDY = SamplingParams(temperature=0.0)


@cfunc(types.void(types.int64, types.int64, types.int64))
def divide(arguments: int, thread: int, threads: int) -> None:
    """Word 0 is the thread that is to fail, -1 for none; words 1 and on count the threads that came here."""
    words = view(arguments, 8, np.int64)
    words[1 + thread] += 1
    if words[0] == thread:
        words[7] = 1 // (words[0] - thread)


class Program:
    """One kernel, twice, with a barrier after each."""

    def __init__(self) -> None:
        self.words = aligned_zeros(8, np.int64)
        self.table = aligned_zeros(2 * OPERATION_FIELDS, np.int64).reshape(-1, OPERATION_FIELDS)
        self.table[:] = divide.address, address(self.words), 1

    def run(self, team: ThreadTeam, failing: int) -> None:
        self.words[0] = failing
        team.run(address(self.table), len(self.table))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_walk_raises_what_a_thread_raised(failing: int, capfd: pytest.CaptureFixture[str]) -> None:
    """All threads end the walk, nothing is printed, and the next walk is a good one."""
    team, program = ThreadTeam(3), Program()
    try:
        program.run(team, -1)
        with pytest.raises(StepError, match="a kernel failed: ZeroDivisionError"):
            program.run(team, failing)
        assert program.words[1:4].tolist() == [4, 4, 4]
        program.run(team, -1)
        assert program.words[1:4].tolist() == [6, 6, 6]
    finally:
        team.close()
    assert "ignored" not in "".join(capfd.readouterr())


def test_two_teams_on_one_thread_keep_theirs_apart() -> None:
    first, second, program = ThreadTeam(1), ThreadTeam(1), Program()
    for team, failing in ((first, -1), (second, 0), (first, -1), (first, 0), (second, -1)):
        if failing < 0:
            program.run(team, failing)
        else:
            with pytest.raises(StepError):
                program.run(team, failing)


def test_what_no_kernel_raised_goes_on_to_the_hook_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_value))
    faults = KernelFaults()
    faults.watch_thread()

    class Broken:
        def __del__(self) -> None:
            raise ValueError("of a finalizer")

    Broken()
    thread = threading.Thread(target=divide.ctypes, args=(address(np.zeros(8, np.int64)), 0, 1))  # watches nothing
    thread.start()
    thread.join()
    assert [type(error) for error in seen] == [ValueError, ZeroDivisionError]
    assert faults.take() == []


RECIPE = Recipe(vocab_size=96)
PROMPTS = {name: tuple(random_tokens(RECIPE, 20, index)) for index, name in enumerate(("first", "beside", "later"))}


class Faulty:
    """A core whose backend's next step can be made to fail in a kernel, on a worker's thread."""

    def __init__(self) -> None:
        spec, checkpoint = random_model(RECIPE)
        config = EngineConfig(threads=2, max_running=2, max_step_tokens=64, kv_cache_bytes=32 << 20)
        self.backend = CPUBackend()
        self.backend.load(spec, checkpoint, resolved(spec, checkpoint, config))
        self.core = new_core(self.backend, spec, config)
        self._program = Program()

    def fail_next(self, monkeypatch: pytest.MonkeyPatch, walk: int) -> None:
        """Let the walk of a number from now on fail: a step walks the body, then the tail."""
        honest, left = self.backend.walk, walk

        def walk_or_fail(program: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._program.run(self.backend.model.team, 1)
            honest(program)  # type: ignore[arg-type]

        monkeypatch.setattr(self.backend, "walk", walk_or_fail)

    def run(self, steps: int = 100) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        while self.core.has_work and steps:
            outputs += stepped(self.core)
            self.core.audit()
            steps -= 1
        return outputs

    def answer(self, name: str) -> list[int]:
        self.core.add(Request(name, PROMPTS[name], GREEDY, 6))
        return [token_id for output in self.run() for token_id in output.token_ids]


@pytest.fixture(scope="module")
def faulty() -> Iterator[Faulty]:
    made = Faulty()
    yield made
    made.core.close()


@pytest.mark.parametrize("walk", [1, 2])
def test_the_steps_requests_end_and_the_engine_goes_on(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, walk: int
) -> None:
    """Two are in the step, one waits for a row; what the step was to write is not taken from the cache later."""
    alone = {name: faulty.answer(name) for name in PROMPTS}
    faulty.core.cache.forget()
    for name, prompt in PROMPTS.items():
        faulty.core.add(Request(name, prompt, GREEDY, 6))
    with monkeypatch.context() as patched:
        faulty.fail_next(patched, walk)
        lost = faulty.run(1)
    assert {output.request_id for output in lost} == {"first", "beside"}
    for output in lost:
        assert output.error == RowError("a kernel failed: ZeroDivisionError: integer division by zero")
    assert "a kernel failed: ZeroDivisionError" in caplog.text
    assert [token_id for output in faulty.run() for token_id in output.token_ids] == alone["later"]
    assert {name: faulty.answer(name) for name in PROMPTS} == alone
