"""Conversations on a model with a state: whatever is found in the cache, tokens are those of the history alone."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.conversations import Chat
from realizar.backends.base import ForwardInput
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CapacityError
from realizar.outputs import SnapshotUse
from realizar.request import Request
from resolving import new_core
from scripted_backend import ScriptedBackend, ScriptedStep, choose, history_states, logprobs_of, make_spec
from step_inputs import TokenOutput, rows_of
from wider import diagonal, wider

# Snapshots in the host's memory or none, drafts or none, steps in flight.
PRESSED = wider(
    [(on_host, drafts, steps) for on_host in (0, 6) for drafts in (0, 3) for steps in (1, 2)],
    (0, 0, 2),
    (0, 3, 1),
    (6, 0, 1),
    (6, 3, 2),
)


def make_core(backend: ScriptedBackend, *, steps_in_flight: int = 1, drafts: int = 0, **options: Any) -> EngineCore:
    config = EngineConfig(max_running=1000, max_step_tokens=10_000, speculative_tokens=drafts, **options)
    spec = make_spec(backend.windows, has_state=True)
    return new_core(backend, spec, config, steps_in_flight=steps_in_flight)


def check(request: Request, choice: int, outputs: list[TokenOutput], backend: ScriptedBackend) -> None:
    """Tokens and log-probabilities are those of the history alone."""
    tokens = [token_id for output in outputs for token_id in output.token_ids]
    prompt, windows, sampling = request.prompt_token_ids, backend.windows, request.sampling
    states = history_states([*prompt, *tokens], windows, has_state=True)
    assert tokens == [
        choose(state, sampling, choice, num_ids=backend.num_ids) for state in states[len(prompt) - 1 : -1]
    ]
    assert len(tokens) == request.max_tokens
    if sampling.logprobs is not None:
        wanted = [logprobs_of(states[len(prompt) - 1 + at], each, 2) for at, each in enumerate(tokens)]
        assert [each for output in outputs for each in output.logprobs] == wanted
    if sampling.prompt_logprobs is not None and choice == 0:
        wanted = [logprobs_of(states[at], prompt[at + 1], 1) for at in range(len(prompt) - 1)]
        assert [each for output in outputs for each in output.prompt_logprobs] == wanted


def check_all(chat: Chat, backend: ScriptedBackend, count: int) -> None:
    """So many requests came, and the answers of those that ended are right."""
    assert len(chat.ended) + chat.lost == count
    assert len(chat.ended) > count / 2
    for request, choices in chat.ended:
        for choice, outputs in enumerate(choices):
            check(request, choice, outputs, backend)


class FaultyBackend(ScriptedBackend):
    """Lacks memory for some steps of several rows, of which nothing is written: neither tokens nor states."""

    def submit(self, forward_input: ForwardInput) -> ScriptedStep:
        if self.num_steps % 29 == 28 and len(rows_of(forward_input)) > 1:
            self.num_steps += 1
            raise CapacityError("the GPU is out of memory: tried 2 GiB")
        return super().submit(forward_input)

    def close(self, row: int) -> None:
        if row in self.rows:
            super().close(row)


@pytest.mark.parametrize(("steps_in_flight", "on_host"), diagonal([1, 2], [0, 9]))
def test_steps_that_do_not_fit_leave_no_snapshot(steps_in_flight: int, on_host: int) -> None:
    backend = FaultyBackend(
        num_blocks=[140 if on_host else 70], max_rows=5, max_step_tokens=24, num_snapshots=1 if on_host else 12,
        num_host_snapshots=on_host,
    )  # fmt: skip
    core = make_core(backend, steps_in_flight=steps_in_flight)
    chat = Chat(steps_in_flight, core)
    chat.run(60)
    check_all(chat, backend, 60)
    assert core.cache.snapshots.counts.restored > 10
    assert not on_host or core.cache.snapshots.counts.fetched > 5


@pytest.mark.parametrize(("on_host", "drafts", "steps_in_flight"), PRESSED)
def test_random_conversations(on_host: int, drafts: int, steps_in_flight: int) -> None:
    """Snapshots and blocks are too few for all, rows are preempted, and conversations are aborted."""
    backend = ScriptedBackend(
        (None, 7), num_blocks=[100, 60] if on_host else [70, 40], max_rows=5, max_step_tokens=24,
        num_ids=4 if drafts else 90, num_snapshots=2 if on_host else 12, num_host_snapshots=on_host,
    )  # fmt: skip
    core = make_core(backend, drafts=drafts, steps_in_flight=steps_in_flight, prompt_lookup_min=1, prompt_lookup_max=1)
    chat = Chat(drafts * 10 + steps_in_flight, core)
    chat.run(200)
    check_all(chat, backend, 200)
    counts, snapshots = core.scheduler.counts, core.cache.snapshots.counts
    assert min(snapshots.taken, snapshots.restored, snapshots.dropped) > 50
    assert not on_host or min(snapshots.stored, snapshots.fetched) > 20
    assert counts.num_preemptions > 5 or on_host
    assert counts.prefix_cache_hits > counts.prefix_cache_queries / 4
    assert not drafts or counts.accepted_tokens > 100
    assert backend.rows == {}


@pytest.mark.parametrize(("on_host", "drafts", "steps_in_flight"), PRESSED)
def test_requests_count_every_snapshot(on_host: int, drafts: int, steps_in_flight: int) -> None:
    """Those that they start from, also after preemptions, that they leave, and that give way to their blocks."""
    backend = ScriptedBackend(
        (None, 7), num_blocks=[60, 40], max_rows=5, max_step_tokens=24,
        num_ids=4 if drafts else 90, num_snapshots=3 if on_host else 12, num_host_snapshots=on_host,
    )  # fmt: skip
    core = make_core(backend, drafts=drafts, steps_in_flight=steps_in_flight)
    chat = Chat(drafts * 10 + steps_in_flight, core, aborts=False)
    chat.run(150)
    assert len(chat.ended) == 150
    used = SnapshotUse.total(outputs[-1].snapshots for _, choices in chat.ended for outputs in choices)
    counts = core.cache.snapshots.counts
    assert used == SnapshotUse(counts.taken, counts.restored, counts.fetched, counts.dropped)
    assert min(used.restored, used.taken, used.dropped) > 20
    assert core.scheduler.counts.num_preemptions > 3


@pytest.mark.parametrize(("on_host", "steps_in_flight"), diagonal([0, 6], [1, 2]))
def test_clearing_in_the_midst_changes_no_answer(
    on_host: int, steps_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows read, decode, start from snapshots and leave some while the cache forgets what it holds."""
    backend = ScriptedBackend(
        (None, 7), num_blocks=[100, 60], max_rows=5, max_step_tokens=24, num_ids=4,
        num_snapshots=2 if on_host else 12, num_host_snapshots=on_host,
    )  # fmt: skip
    core = make_core(backend, drafts=3, steps_in_flight=steps_in_flight)
    chat, step, cleared = Chat(steps_in_flight, core), core.step, [0]

    def step_and_clear() -> list[TokenOutput]:
        if chat.rng.random() < 0.03:
            core.clear_cache()
            core.audit()
            assert core.cache.snapshots.counts.kept == core.cache.snapshots.counts.host_kept == 0
            cleared[0] += 1
        return step()

    monkeypatch.setattr(core, "step", step_and_clear)
    chat.run(120)
    check_all(chat, backend, 120)
    assert cleared[0] > 5
    assert core.cache.snapshots.counts.restored > 10
    assert core.scheduler.counts.prefix_cache_hits > 0
    assert not on_host or core.cache.snapshots.counts.fetched > 0
