"""Conversations on a model with a state: whatever is found in the cache, tokens are those of the history alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.core.conversations import Conversation, Conversations
from realizar.backends.base import ForwardInput
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CapacityError
from realizar.outputs import TokenOutput
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from resolving import new_core
from scripted_backend import ScriptedBackend, ScriptedStep, choose, history_states, logprobs_of, make_spec


def make_core(backend: ScriptedBackend, *, steps_in_flight: int = 1, drafts: int = 0, **options: Any) -> EngineCore:
    config = EngineConfig(max_running=1000, max_step_tokens=10_000, speculative_tokens=drafts, **options)
    spec = make_spec(backend.windows, has_state=True)
    return new_core(backend, spec, config, steps_in_flight=steps_in_flight)


class Chat:
    """Users in conversation with a core, which is audited after each step."""

    def __init__(self, seed: int, core: EngineCore, backend: ScriptedBackend, *, longest: int) -> None:
        self.rng = random.Random(seed)
        self.core, self.backend = core, backend
        self.users = Conversations(self.rng, longest)
        self.open: dict[str, tuple[Request, Conversation]] = {}
        self.found: dict[tuple[str, int], list[TokenOutput]] = {}
        self.ended: dict[str, int] = {}
        self.arrived = self.checked = self.aborted = 0

    def run(self, arrivals: int) -> None:
        while self.arrived < arrivals or self.core.has_work:
            while self.arrived < arrivals and len(self.open) < 6 and self.rng.random() < 0.6:
                self._add()
            if self.open and self.rng.random() < 0.01:
                name = self.rng.choice(list(self.open))
                self.core.abort(name)
                del self.open[name]
                self.aborted += 1
            for output in self.core.step():
                self._take_in(output)
            self.core.audit()

    def _add(self) -> None:
        rng = self.rng
        talk = self.users.next()
        prompt, marks = talk.prompt()
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.0]), seed=rng.randrange(9), n=rng.choice([1, 1, 1, 2]),
            logprobs=rng.choice([None, 2]), prompt_logprobs=rng.choice([None] * 9 + [1]),
        )  # fmt: skip
        request = Request(
            str(self.arrived), prompt, sampling, rng.randint(1, 24), cache_salt=talk.salt,
            prompt_marks=marks if rng.random() < 0.8 else (),
        )  # fmt: skip
        self.core.add(request)
        self.open[request.request_id] = request, talk
        self.arrived += 1

    def _take_in(self, output: TokenOutput) -> None:
        name = output.request_id
        if output.error is not None:
            assert output.error.cause == "memory"
            del self.open[name]
            self.aborted += 1
        self.found.setdefault((name, output.choice), []).append(output)
        if output.finish_reason is None or name not in self.open:
            return
        request, talk = self.open[name]
        tokens = self._check(request, output.choice)
        self.ended[name] = self.ended.get(name, 0) + 1
        if self.ended[name] == request.sampling.n:
            talk.answered(tokens)
            del self.open[name]
            self.checked += 1

    def _check(self, request: Request, choice: int) -> list[int]:
        outputs = self.found[request.request_id, choice]
        tokens = [token_id for output in outputs for token_id in output.token_ids]
        prompt, windows, sampling = request.prompt_token_ids, self.backend.windows, request.sampling
        states = history_states([*prompt, *tokens], windows, has_state=True)
        assert tokens == [
            choose(state, sampling, choice, num_ids=self.backend.num_ids) for state in states[len(prompt) - 1 : -1]
        ]
        assert len(tokens) == request.max_tokens
        if sampling.logprobs is not None:
            wanted = [logprobs_of(states[len(prompt) - 1 + at], each, 2) for at, each in enumerate(tokens)]
            assert [each for output in outputs for each in output.logprobs] == wanted
        if sampling.prompt_logprobs is not None and choice == 0:
            wanted = [logprobs_of(states[at], prompt[at + 1], 1) for at in range(len(prompt) - 1)]
            assert [each for output in outputs for each in output.prompt_logprobs] == wanted
        return tokens


class FaultyBackend(ScriptedBackend):
    """Lacks memory for some steps, of which nothing is written: neither tokens nor states."""

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        if self.num_steps % 29 == 28:
            self.num_steps += 1
            raise CapacityError("the GPU is out of memory: tried 2 GiB")
        return super().submit(forward_input)

    def close(self, row: int) -> None:
        if row in self.rows:
            super().close(row)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_that_do_not_fit_leave_no_snapshot(steps_in_flight: int) -> None:
    backend = FaultyBackend(num_blocks=[70], max_rows=5, max_step_tokens=24, num_snapshots=12)
    core = make_core(backend, steps_in_flight=steps_in_flight)
    chat = Chat(steps_in_flight, core, backend, longest=120)
    chat.run(60)
    assert chat.checked + chat.aborted == 60
    assert core.snapshot_counts.restored > 10


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("windows", [(None,), (None, 7)], ids=str)
def test_random_conversations(windows: tuple[int | None, ...], drafts: int, steps_in_flight: int) -> None:
    """Snapshots and blocks are too few for all, rows are preempted, and conversations are aborted."""
    backend = ScriptedBackend(
        windows, num_blocks=[70, 40][: len(windows)], max_rows=5, max_step_tokens=24, num_snapshots=12,
        num_ids=4 if drafts else 90,
    )  # fmt: skip
    core = make_core(backend, drafts=drafts, steps_in_flight=steps_in_flight)
    chat = Chat(drafts * 10 + steps_in_flight, core, backend, longest=120)
    chat.run(200)
    counts, snapshots = core.counts, core.snapshot_counts
    assert chat.checked + chat.aborted == 200
    assert min(snapshots.taken, snapshots.restored, snapshots.dropped) > 50
    assert counts.preemptions > 5
    assert counts.prefix_cache_hits > counts.prefix_cache_queries / 4
    assert not drafts or counts.accepted_tokens > 100
    assert backend.rows == {}
