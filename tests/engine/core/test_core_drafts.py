"""A drafter is asked once a step, after its results; what it does, its faults included, changes no token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.core_runs import run as run_core
from engine.core.core_runs import tokens
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import InvalidRequestError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.row_table import Sequence as Scheduled
from resolving import new_core
from scripted_backend import VOCAB_SIZE, ScriptedBackend, expected_tokens, make_spec
from step_inputs import stepped

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = {name: tuple(range(start, start + 9)) for name, start in (("a", 1), ("b", 20), ("c", 40))}
COUNT = 12


class Foreseeing:
    """Proposes what will be sampled, the last draft apart, as something that knows the text would.

    Attributes:
        calls: names of the requests that each call was about. verdicts: drafts and right ones, by request.
    """

    def __init__(self, size: int, *, awaits_results: bool = True, fails_at: str = "") -> None:
        self.size, self.awaits_results, self.fails_at = size, awaits_results, fails_at
        self.calls: list[list[str]] = []
        self.verdicts: dict[str, list[tuple[int, int]]] = {}
        self.open: set[int] = set()

    def propose(self, sequences: Sequence[Scheduled]) -> list[tuple[int, ...]]:
        self.calls.append([each.request.request_id for each in sequences])
        self.open |= {each.sequence_id for each in sequences}
        if self.fails_at == "propose" and len(self.calls) == 3:
            raise ZeroDivisionError("a bug")
        return [self._drafts(each) for each in sequences]

    def _drafts(self, sequence: Scheduled) -> tuple[int, ...]:
        assert not sequence.num_pending
        assert sequence.num_chunk_tokens == 1
        size = min(self.size, sequence.max_drafts)
        drafts = expected_tokens(sequence.token_ids.tolist(), (None,), GREEDY, size)
        return (*drafts[:-1], (drafts[-1] + 1) % 97) if drafts else ()

    def verified(self, sequence: Scheduled, num_drafts: int, num_accepted: int) -> None:
        self.verdicts.setdefault(sequence.request.request_id, []).append((num_drafts, num_accepted))
        if self.fails_at == "verified":
            raise ZeroDivisionError("a bug")

    def forget(self, sequence_id: int) -> None:
        self.open.discard(sequence_id)
        if self.fails_at == "forget":
            raise ZeroDivisionError("a bug")


def run(drafter: Foreseeing, in_flight: int = 1, step_tokens: int = 64) -> tuple[ScriptedBackend, EngineCore, int]:
    """Three requests to their end; returns how many steps were in flight at most, too."""
    backend = ScriptedBackend(max_step_tokens=step_tokens)
    config = EngineConfig(max_running=8, max_step_tokens=step_tokens, speculative_tokens=3)
    core = new_core(backend, make_spec((None,)), config, steps_in_flight=in_flight, drafter=drafter)
    for name, prompt in PROMPTS.items():
        core.add(Request(name, prompt, GREEDY, COUNT))
    found: dict[str, list[int]] = {name: [] for name in PROMPTS}
    most = 0
    while core.has_work:
        for output in stepped(core):
            assert output.error is None
            found[output.request_id].extend(output.token_ids)
        most = max(most, len(core._in_flight))
        core.audit()
    assert found == {name: expected_tokens(prompt, (None,), GREEDY, COUNT) for name, prompt in PROMPTS.items()}
    return backend, core, most


def test_the_drafts_of_a_step_are_asked_for_in_one_call() -> None:
    """Three rows: a step of prompts, then steps of 3 drafts of which 2 are right. Each call is for all rows."""
    drafter = Foreseeing(3)
    backend, core, _ = run(drafter)
    assert drafter.calls == [["a", "b", "c"]] * 4
    assert backend.num_steps == 6
    assert drafter.verdicts == {name: [(3, 2), (3, 2), (3, 2), (1, 0)] for name in PROMPTS}
    assert (core.scheduler.counts.draft_tokens, core.scheduler.counts.accepted_tokens) == (30, 18)
    assert not drafter.open


@pytest.mark.parametrize("fails_at", ["propose", "verified", "forget"])
def test_a_drafter_that_raises_is_used_no_more(fails_at: str) -> None:
    drafter = Foreseeing(3, fails_at=fails_at)
    backend, _, _ = run(drafter)
    assert len(drafter.calls) == {"propose": 3, "verified": 1, "forget": 4}[fails_at]
    assert backend.num_steps > (4 if fails_at == "forget" else 7)


def test_two_steps_stay_in_flight_where_the_drafter_waits_for_nothing() -> None:
    drafter = Foreseeing(3, awaits_results=False)
    _, core, most = run(drafter, in_flight=2)
    assert most == 1  # one is left in flight when a step returns
    assert core.scheduler.counts.accepted_tokens > 0 or not drafter.calls


@pytest.mark.parametrize("in_flight", [1, 2])
def test_prompts_are_read_ahead_and_sampled_tokens_awaited(in_flight: int) -> None:
    """A long prompt's chunks overlap; no step follows a sampled token that drafts may follow before that is known."""
    drafter = Foreseeing(3)
    backend, core, most = run(drafter, in_flight, step_tokens=4)
    assert most == in_flight - 1
    assert core.scheduler.counts.accepted_tokens > 0
    reference, _, _ = run(Foreseeing(3), 1, step_tokens=4)
    assert backend.num_steps == reference.num_steps


def test_drafts_that_the_backend_has_no_room_for_are_dropped() -> None:
    drafter = Foreseeing(6)
    run(drafter)
    assert drafter.verdicts == {name: [(3, 3), (3, 3), (2, 1)] for name in PROMPTS}


@pytest.mark.parametrize("beyond", [VOCAB_SIZE, -1])
def test_drafts_from_the_first_beyond_the_vocabulary_on_are_dropped(
    monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    drafter = Foreseeing(3)
    honest = drafter._drafts

    def drafts(sequence: Scheduled) -> tuple[int, ...]:
        found = honest(sequence)
        return (*found[:1], beyond, *found[2:])

    monkeypatch.setattr(drafter, "_drafts", drafts)
    run(drafter)
    assert drafter.verdicts == {name: [(1, 1)] * 5 for name in PROMPTS}


def test_a_drafter_without_room_for_drafts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="a drafter needs speculative_tokens of at least 1, not 0"):
        new_core(ScriptedBackend(), make_spec((None,)), EngineConfig(), drafter=Foreseeing(3))


def run_proposing(count: int, **fields: int) -> tuple[ScriptedBackend, EngineCore]:
    """Three requests to their end on a backend that proposes 3 drafts, one more than half of them right."""
    backend = ScriptedBackend(max_step_tokens=64, num_drafts=3)
    config = EngineConfig(max_running=8, max_step_tokens=64, speculative_tokens=3, **fields)
    core = new_core(backend, make_spec((None,)), config, steps_in_flight=2)
    for name, prompt in PROMPTS.items():
        core.add(Request(name, prompt, GREEDY, count))
    found = run_core(core)
    for name, prompt in PROMPTS.items():
        assert tokens(found[name]) == expected_tokens(prompt, (None,), GREEDY, count)
    return backend, core


def test_drafts_of_the_backend_are_verified_and_counted() -> None:
    backend, core = run_proposing(COUNT)
    assert backend.num_steps <= 6
    assert core.scheduler.counts.draft_tokens >= core.scheduler.counts.accepted_tokens > 3 * COUNT // 2
    plain = ScriptedBackend(max_step_tokens=64)
    without = new_core(plain, make_spec((None,)), EngineConfig(max_running=8, max_step_tokens=64))
    for name, prompt in PROMPTS.items():
        without.add(Request(name, prompt, GREEDY, COUNT))
    run_core(without)
    assert plain.num_steps == COUNT


def test_what_is_looked_up_goes_before_what_the_backend_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that knows the text is believed; it is told of its own drafts alone."""
    drafter = Foreseeing(2)
    monkeypatch.setattr(drafter, "propose", lambda sequences: [
        drafter._drafts(each) if each.request.request_id == "a" else () for each in sequences
    ])  # fmt: skip
    backend = ScriptedBackend(max_step_tokens=64, num_drafts=3)
    config = EngineConfig(max_running=8, max_step_tokens=64, speculative_tokens=3)
    core = new_core(backend, make_spec((None,)), config, drafter=drafter)
    for name, prompt in PROMPTS.items():
        core.add(Request(name, prompt, GREEDY, COUNT))
    found = run_core(core)
    for name, prompt in PROMPTS.items():
        assert tokens(found[name]) == expected_tokens(prompt, (None,), GREEDY, COUNT)
    assert set(drafter.verdicts) == {"a"}
    assert core.scheduler.counts.draft_tokens > sum(drafts for drafts, _ in drafter.verdicts["a"])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_draft_is_wanted_that_no_sampled_token_could_follow(count: int) -> None:
    _, core = run_proposing(count, prompt_lookup_min=4)
    assert core.scheduler.counts.draft_tokens == 3 * max(count - 2, 0)
