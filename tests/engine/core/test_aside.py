"""Chunks that are read aside, against the scripted backend: whatever runs beside them, ends, gives way or fails, the
tokens are those of each request alone.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import replace

import pytest

from realizar.backends.base import ForwardInput
from realizar.config import EngineConfig
from realizar.errors import CapacityError, StepError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Pace, Policy
from resolving import new_core
from scripted_backend import ScriptedBackend, ScriptedStep, expected_tokens, make_spec, require
from step_inputs import stepped

TOKENS = 8


class AsideBackend(ScriptedBackend):
    """Its chunks leave keys and values when they end, some time after they began, and read all others only then."""

    def __init__(self, rng: random.Random, fault_share: float) -> None:
        super().__init__((None,), num_blocks=[40], max_rows=6, max_step_tokens=16, context_length=80)
        self.limits = replace(self.limits, aside_tokens=TOKENS)
        self._rng, self._fault_share = rng, fault_share
        self._chunks: deque[ForwardInput] = deque()
        self.num_chunks = self.num_beside = self.num_awaited = 0

    def read_aside(self, chunk: ForwardInput) -> None:
        require(0 < len(chunk.columns.token_ids) <= TOKENS, "a chunk is too long")
        require(not chunk.columns.samples.any(), "a chunk aside samples nothing")
        self._fail(10)
        if self._last is not None:
            self._last.result()
        self._chunks.append(chunk)

    def num_aside(self) -> int:
        while self._chunks and self._rng.random() < 0.3:
            self._end()
        return len(self._chunks)

    def await_aside(self) -> None:
        self.num_awaited += bool(self._chunks)
        while self._chunks:
            self._end()

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        rows = {int(chunk.columns.numbers[0]) for chunk in self._chunks}
        require(not rows & set(forward_input.columns.numbers.tolist()), "a row is in a step beside its own chunk")
        self.num_beside += bool(self._chunks)
        self._fail()
        return super().submit(forward_input)

    def _end(self) -> None:
        chunk = self._chunks.popleft()
        self.num_chunks += 1
        for index, token_id in enumerate(chunk.columns.token_ids.tolist()):
            slot, position = int(chunk.slot_mapping[0][index]), int(chunk.positions[index])
            self._store(0, chunk.block_tables[0][0], slot, position, token_id)

    def _fail(self, times: int = 1) -> None:
        if self._rng.random() < times * self._fault_share:
            raise self._rng.choice([CapacityError("no memory"), StepError("a kernel failed")])


@pytest.mark.parametrize(("steps_in_flight", "fault_share"), [(1, 0.0), (2, 0.0), (2, 0.005)])
def test_random_arrivals_and_aborts(steps_in_flight: int, fault_share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of prompts, short and long, through a pool that is too small, and chunks that take any time."""
    rng = random.Random(10 * steps_in_flight + bool(fault_share))
    monkeypatch.setattr("realizar.scheduler.plan._LEAST_ASIDE", 3)
    monkeypatch.setattr("realizar.scheduler.plan._LEFT_ASIDE", 2)
    monkeypatch.setattr(Pace, "lets_aside", lambda *_: rng.random() < 0.9)
    monkeypatch.setattr(Pace, "pause_s", lambda *_: rng.choice([0.0, 1e-6]))
    slept = list[float]()
    monkeypatch.setattr("time.sleep", slept.append)
    backend = AsideBackend(rng, fault_share)
    config = EngineConfig(max_running=1000, max_step_tokens=10_000)
    core = new_core(backend, make_spec((None,)), config, steps_in_flight=steps_in_flight, policy=Policy(stretch=4))
    open_requests: dict[str, Request] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    arrived = failed = 0
    while arrived < 300 or core.has_work:
        while arrived < 300 and len(open_requests) < rng.choice([3, 8]) and rng.random() < 0.3:
            length = rng.choice([rng.randint(1, 8), rng.randint(30, 60)])
            prompt = tuple(rng.randrange(90) for _ in range(length))
            request = Request(str(arrived), prompt, SamplingParams(temperature=0.0), rng.randint(1, 20))
            core.add(request)
            open_requests[request.request_id] = request
            arrived += 1
        if open_requests and rng.random() < 0.02:
            name = rng.choice(list(open_requests))
            core.abort(name)
            del open_requests[name]
        for output in stepped(core):
            tokens[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None or output.error is not None:
                request = open_requests.pop(output.request_id)
                failed += output.error is not None
                got = tokens[output.request_id]
                assert got == expected_tokens(request.prompt_token_ids, (None,), request.sampling, len(got))
                assert output.error is not None or len(got) == request.max_tokens
        core.audit()
    assert backend.rows == {}
    # After a fault steps are small for a while, and nothing is read aside.
    assert min(backend.num_chunks, backend.num_beside) > (15 if fault_share else 50)
    assert min(backend.num_awaited, len(slept)) > (0 if fault_share else 5)
    assert (failed > 0) is (fault_share > 0)
