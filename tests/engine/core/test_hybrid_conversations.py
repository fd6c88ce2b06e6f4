"""Conversations with hybrids on the CPU: whatever is reused, texts and log-probabilities have a fresh one's bits."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.core.conversations import Chat
from engine.core.core_runs import run, tokens
from engine.core.late_service import LateService
from random_models import Recipe, random_model
from realizar.backends.base import Capacity
from realizar.backends.cpu.operations import BoundProgram
from realizar.backends.cpu.runner import CPUBackend, CPUStep
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.core.row_grammars import Patience
from realizar.errors import CapacityError
from realizar.outputs import TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.scheduler.pace import Policy
from resolving import resolved
from scripted_backend import VOCAB_SIZE
from step_inputs import TokenOutput
from structured.grammar_engines import END
from wider import diagonal, wider

RECIPES = {
    "convolutions": Recipe(
        vocab_size=128, hidden_size=128, feed_forward_size=128, num_heads=2, num_kv_heads=1, length=3,
        context_length=4096, windows=(None, None, None, 70), recurrent=("convolution", None, "convolution", None),
    ),
    "delta-nets": Recipe(
        vocab_size=128, hidden_size=128, feed_forward_size=128, num_heads=2, num_kv_heads=1, parts=("output_gate",),
        context_length=4096, windows=(None, None, None, 70), recurrent=("delta", "delta", None, None),
    ),
}  # fmt: skip


GRAMMAR = StructuredOutput("regex", "[a-z]{3,20}")


class TightBackend(CPUBackend):
    """Has fewer blocks and snapshots than there is memory for, so that all of them are given up again and again.

    Args:
        on_host: snapshots in the host's memory; with any, those on the device are fewer yet, and blocks are more.
    """

    def __init__(self, on_host: int = 0) -> None:
        super().__init__()
        self.on_host = on_host

    def capacity(self) -> Capacity:
        found = super().capacity()
        assert found.num_snapshots >= 12
        assert found.num_host_snapshots >= self.on_host
        most, kept = (60, 2) if self.on_host else (30, 12)
        return replace(
            found, num_blocks=tuple(min(count, most) for count in found.num_blocks), num_snapshots=kept,
            num_host_snapshots=self.on_host,
        )  # fmt: skip


class FailingBackend(TightBackend):
    """Has no memory for a step now and then, some of which have computed everything by then."""

    def __init__(self, on_host: int = 0) -> None:
        super().__init__(on_host)
        self.rng, self.num_failed, self.fails = random.Random(5), 0, False

    def walk(self, program: BoundProgram) -> None:
        fails = self.fails and program is self.model.body and self.rng.random() < 0.015
        if not fails or self.rng.random() < 0.5:
            super().walk(program)
        if fails:
            self.num_failed += 1
            raise CapacityError("no step today")


def make_core(
    recipe: Recipe, backend: CPUBackend, *, steps_in_flight: int = 1, service: LateService | None = None, **options: Any
) -> EngineCore:
    spec, checkpoint = random_model(recipe)
    config = EngineConfig(
        threads=1, max_step_tokens=96, kv_cache_bytes=64 << 20, host_snapshot_bytes=8 << 20, **options
    )
    settled = replace(resolved(spec, checkpoint, config), steps_in_flight=steps_in_flight)
    backend.load(spec, checkpoint, settled)
    grammars = None if service is None else lambda: service
    return EngineCore(backend, spec, settled, policy=Policy(stretch=math.inf), new_grammars=grammars)


def contents(outputs: Sequence[TokenOutput]) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]:
    """Tokens, their log-probabilities and those of the prompt."""
    return (
        tokens(list(outputs)),
        [each for output in outputs for each in output.logprobs],
        [each for output in outputs for each in output.prompt_logprobs],
    )


def compare(chat: Chat, fresh: EngineCore) -> None:
    """Every answer of a chat is that of a fresh computation."""
    for request, choices in chat.ended:
        alone: list[list[TokenOutput]] = [[] for _ in choices]
        fresh.add(request)
        for output in run(fresh)[request.request_id]:
            alone[output.choice].append(output)
        assert [contents(each) for each in choices] == [contents(each) for each in alone]


@pytest.mark.parametrize(("name", "pressed"), diagonal(RECIPES, [(0, 2, 0), (3, 1, 0), (0, 1, 8), (3, 2, 8)]))
def test_random_conversations(name: str, pressed: tuple[int, int, int]) -> None:
    """Edits, branches, tenants, a window, preemption, aborts, drafts, and blocks and snapshots too few for all.

    Without snapshots in the host's memory, and with some.
    """
    drafts, steps_in_flight, on_host = pressed
    recipe, backend = RECIPES[name], TightBackend(on_host)
    core = make_core(
        recipe, backend, max_running=5, context_length=640, speculative_tokens=drafts, steps_in_flight=steps_in_flight
    )
    fresh = make_core(recipe, CPUBackend(), max_running=1, context_length=640, prefix_cache=False)
    try:
        chat = Chat(7 + drafts, core, scale=4, few_ids=drafts > 0)
        chat.run(100)
        assert len(chat.ended) + chat.lost == 100
        compare(chat, fresh)
        snapshots, counts = core.cache.snapshots.counts, core.scheduler.counts
        assert min(snapshots.restored, snapshots.dropped) > 30
        assert not on_host or min(snapshots.stored, snapshots.fetched) > 10
        assert counts.num_preemptions > 0 or on_host
        assert counts.prefix_cache_hits > counts.prefix_cache_queries / 4
        assert counts.draft_tokens > counts.accepted_tokens > 20 or not drafts
    finally:
        core.close()
        fresh.close()


@pytest.fixture
def services() -> Iterator[tuple[LateService, LateService]]:
    made = LateService(), LateService()
    yield made
    for each in made:
        each.end()


@pytest.mark.parametrize(
    ("name", "drafts", "steps_in_flight", "on_host"),
    wider(
        [("convolutions", 3, 2, 0), ("delta-nets", 0, 2, 0), ("delta-nets", 3, 2, 8)],
        ("convolutions", 3, 2, 0),
        ("delta-nets", 3, 2, 8),
    ),
)
def test_late_masks_and_steps_without_memory(
    name: str, drafts: int, steps_in_flight: int, on_host: int, services: tuple[LateService, LateService],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rows that are deferred, and rows that start again in others, beside snapshots that are taken and given up."""
    monkeypatch.setattr(Patience, "left_s", lambda *_: 0.0)
    services[0].lateness = lambda row: (row.slot * 7 + len(row.output) * 3) % 5
    deferred, defer = [0], CPUStep.defer

    def count(self: CPUStep, rows: Collection[int]) -> None:
        deferred[0] += len(rows)
        defer(self, rows)

    monkeypatch.setattr(CPUStep, "defer", count)
    recipe, backend = replace(RECIPES[name], vocab_size=VOCAB_SIZE), FailingBackend(on_host)
    core = make_core(
        recipe, backend, max_running=5, context_length=640, speculative_tokens=drafts, steps_in_flight=steps_in_flight,
        service=services[0],
    )  # fmt: skip
    fresh = make_core(recipe, CPUBackend(), max_running=1, context_length=640, prefix_cache=False, service=services[1])
    try:
        backend.fails = True
        chat = Chat(11, core, scale=4, grammar=(GRAMMAR, END))
        chat.run(50)
        compare(chat, fresh)
        assert len(chat.ended) > 25
        assert backend.num_failed > 5
        assert deferred[0] > 50
        assert core.cache.snapshots.counts.restored > 5
        assert not on_host or core.cache.snapshots.counts.fetched > 1
    finally:
        core.close()
        fresh.close()


@pytest.mark.parametrize("name", RECIPES)
def test_a_turn_computes_what_is_new(name: str) -> None:
    """The next turn of a long conversation, and an edit of its fifth message (`scripts/time_scheduling.py`)."""
    recipe = replace(RECIPES[name], windows=(None,) * 4)  # blocks of windows are few: they are given up sooner
    core = make_core(recipe, CPUBackend(), max_running=1, context_length=4096)
    fresh = make_core(recipe, CPUBackend(), max_running=1, context_length=4096, prefix_cache=False)
    messages = [tuple((7 * place + 13 * index) % 90 for place in range(100)) for index in range(20)]
    marks = tuple(range(100, 2001, 100))
    talk = tuple(token_id for message in messages for token_id in message)

    def cached(name: str, prompt: tuple[int, ...]) -> int:
        """Tokens found in the cache; the answer is that of a fresh computation."""
        request = Request(name, prompt, SamplingParams(temperature=0.0, logprobs=1), 8, prompt_marks=marks)
        found = []
        for each in (core, fresh):
            each.add(request)
            found.append(run(each)[name])
        assert contents(found[0]) == contents(found[1])
        return found[0][0].num_cached_tokens

    try:
        assert cached("cold", (*talk, 91)) == 0
        assert cached("next", (*talk, 5, 6, 7, *talk[:60], 91)) == 1984  # of 2,000, in blocks of 32
        edited = (*talk[:400], 92, *talk[401:], 91)
        assert cached("edit", edited) == 288  # few enough snapshots leave one for two messages of so many
        assert cached("edited again", (*talk[:400], 93, *talk[401:], 91)) == 384
    finally:
        core.close()
        fresh.close()
