"""Chunks that are read aside, against the scripted backend: whatever runs between their parts, ends, gives way or
fails, the tokens are those of each request alone.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest

from realizar.backends.base import ForwardInput
from realizar.batch import AsideSizes
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CapacityError, StepError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Pace, Policy
from resolving import new_core
from scripted_backend import ScriptedBackend, ScriptedStep, expected_tokens, make_spec, require
from step_inputs import rows_of, stepped

SIZES = AsideSizes(parts=5, tokens=8, beside=8)


class AsideBackend(ScriptedBackend):
    """Its chunks aside leave keys and values with their last part, and nothing before. Steps fail at times."""

    def __init__(self, windows: Sequence[int | None], rng: random.Random, fault_share: float = 0.0) -> None:
        blocks = [40] * len(windows)
        super().__init__(windows, num_blocks=blocks, max_rows=6, max_step_tokens=16, context_length=80)
        self.limits = replace(self.limits, aside=SIZES)
        self._rng, self._fault_share = rng, fault_share
        self._chunk: ForwardInput | None = None
        self._num_run = 0
        self.num_chunks = self.num_dropped = self.num_between = 0

    core: EngineCore

    def begin_aside(self, chunk: ForwardInput) -> None:
        self.num_dropped += self._chunk is not None
        require(0 < len(chunk.columns.token_ids) <= SIZES.tokens, "a chunk is too long")
        require(not chunk.columns.samples.any(), "a chunk aside samples nothing")
        self._chunk, self._num_run = chunk, 0

    def run_aside(self, num_parts: int) -> None:
        require(self._chunk is not None and num_parts > 0, "no chunk is read aside")
        assert self._chunk is not None
        self._num_run += num_parts
        require(self._num_run <= SIZES.parts, "a chunk has run more than its parts")
        if self._num_run == SIZES.parts:
            if self._last is not None:
                self._last.result()
            self._run_row(0, rows_of(self._chunk)[0], self._chunk)
            self._chunk = None
            self.num_chunks += 1

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        if self.core.scheduler._aside.has_begun and self._num_run:
            require(len(forward_input.columns.token_ids) <= SIZES.beside, "a step beside a chunk is too long")
            self.num_between += 1
        if self._rng.random() < self._fault_share:
            raise self._rng.choice([CapacityError("no memory"), StepError("a kernel failed")])
        return super().submit(forward_input)


@pytest.mark.parametrize(
    ("windows", "steps_in_flight", "fault_share"),
    [((None,), 1, 0.0), ((None,), 2, 0.005), ((None, 7), 2, 0.0), ((20,), 2, 0.005)],
)
def test_random_arrivals_and_aborts(
    windows: tuple[int | None, ...], steps_in_flight: int, fault_share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of prompts, short and long, through a pool that is too small, any number of parts before any step."""
    rng = random.Random(len(windows) * 10 + steps_in_flight)
    for module in ("plan", "scheduler"):
        monkeypatch.setattr(f"realizar.scheduler.{module}.LEFT_TOKENS", 2)
    monkeypatch.setattr(Pace, "aside_parts", lambda *_: rng.randrange(4))
    monkeypatch.setattr(Pace, "aside_pays", lambda *_, **__: rng.random() < 0.8)
    backend = AsideBackend(windows, rng, fault_share)
    config = EngineConfig(max_running=1000, max_step_tokens=10_000)
    core = new_core(
        backend, make_spec(windows), config, steps_in_flight=steps_in_flight, policy=Policy(stretch=rng.choice([2, 9]))
    )
    backend.core = core
    open_requests: dict[str, Request] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    arrived = failed = 0
    while arrived < 250 or core.has_work:
        while arrived < 250 and len(open_requests) < 10 and rng.random() < 0.4:
            length = rng.choice([rng.randint(1, 8), rng.randint(30, 60)])
            prompt = tuple(rng.randrange(90) for _ in range(length))
            request = Request(str(arrived), prompt, SamplingParams(temperature=0.0), rng.randint(1, 16))
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
                assert got == expected_tokens(request.prompt_token_ids, windows, request.sampling, len(got))
                assert output.error is not None or len(got) == request.max_tokens
        core.audit()
    assert backend.rows == {}
    assert backend.num_chunks > 20
    assert backend.num_between > 50
    assert backend.num_dropped > 0
    assert (failed > 0) is (fault_share > 0)
