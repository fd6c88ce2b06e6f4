"""A service of grammars over a small vocabulary, and rows that are compared with this process's own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import GrammarFactory
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.workers.grammar_rows import GrammarRow
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import WorkerLimits
from structured.grammar_walks import CONTROL, END, TOKENS, allowed_ids, masks_of
from waits import HANG_S, is_alive, stop, wait_until

VOCAB_SIZE = len(TOKENS) + 7
GRAMMAR_TOKENS = GrammarTokens(TOKENS, (CONTROL,), (END,), VOCAB_SIZE)
FACTORY = GrammarFactory(GRAMMAR_TOKENS)
LETTERS = StructuredOutput("regex", "[a-f]{3,40}x")
DIGITS = StructuredOutput("regex", "[0-9]{3,40}x")
# Compiling takes time quadratic in the properties of each rule: four seconds of a fast processor.
_WIDE = json.dumps({"type": "object", "properties": {str(i): {} for i in range(1024)}}, separators=(",", ":"))
_RULES = "".join(f"r{i}: %json {_WIDE}\n" for i in range(50))
ENDLESS = StructuredOutput("lark", f"start: {' '.join(f'r{i}' for i in range(50))}\n{_RULES}")
BYTES = {token: index for index, token in enumerate(TOKENS) if len(token) == 1 and index > 1}
PATIENT = WorkerLimits(compile_cpu_s=600, compile_s=600, step_s=600, stall_s=600)


def make_service(limits: WorkerLimits | None = None, **options: Any) -> GrammarService:
    return GrammarService(GRAMMAR_TOKENS, limits=limits, **options)


def end_workers(service: GrammarService, number: signal.Signals = signal.SIGKILL) -> list[int]:
    """Send all workers with rows a signal; returns their pids."""
    pids = list[int]()
    for worker in [worker for worker in service._pool.workers.values() if worker.slots]:
        wait_until(lambda worker=worker: worker.pid is not None)  # type: ignore[misc]
        assert worker.pid is not None
        pids.append(worker.pid)
        os.kill(worker.pid, number)
    return pids


def end_harmless_workers(service: GrammarService) -> list[int]:
    """Kill all workers with rows; returns their pids. What is rightly taken for the cause of two deaths is let through.

    That is a grammar while it is compiled, and a row where it has ended a worker: a slow machine meets them twice.
    """
    workers = [worker for worker in service._pool.workers.values() if worker.slots]
    for worker in workers:
        wait_until(lambda worker=worker: worker.pid is not None)  # type: ignore[misc]
        assert worker.pid is not None
        stop(worker.pid)
        while is_alive(worker.pid) and _is_suspect(service, int(service._memory.working[worker.place])):
            os.kill(worker.pid, signal.SIGCONT)
            time.sleep(0.001)
            stop(worker.pid)
        os.kill(worker.pid, signal.SIGKILL)
    return [worker.pid for worker in workers if worker.pid is not None]


def _is_suspect(service: GrammarService, working: int) -> bool:
    rows = service.rows._rows.values()
    return working < 0 or any(row.key == working and row.died_at == len(row.output) for row in rows)


def served_masks(service: GrammarService, rows: Sequence[tuple[GrammarRow, Sequence[int]]]) -> list[NDArray[np.uint32]]:
    """As `masks_of` gives them; those of a row that can't go on are empty."""
    slots = np.array([row.slot for row, _ in rows], np.intp)
    service.rows.ask(slots, {row.slot: tuple(drafts) for row, drafts in rows if drafts})
    finish(service, slots)
    found = [service.rows.memory.of(row.slot, len(drafts)) for row, drafts in rows]
    failed = service.rows.are_failed(slots).tolist()
    return [np.zeros_like(each) if fails else each.copy() for each, fails in zip(found, failed, strict=True)]


def advance(service: GrammarService, row: GrammarRow, token_ids: Sequence[int]) -> None:
    """Have a row take in sampled tokens."""
    sampled = np.array(token_ids, np.int32)[None]
    service.rows.advance(np.array([row.slot]), sampled, np.array([len(token_ids)]))


class Follower:
    """A row in a service, beside one in this process that says what its masks must be."""

    def __init__(self, service: GrammarService, structured: StructuredOutput, seed: int = 0) -> None:
        service.prepare(structured)
        self._service = service
        self.row = service.open_row(structured, ())
        self._matcher = FACTORY.compile(structured).start()
        self._rng = np.random.default_rng(seed)

    def expected(self, drafts: Sequence[int] = ()) -> Any:
        """Its next masks, uint32 [drafts + 1, words]."""
        return masks_of(FACTORY, [(self._matcher, drafts)])[0]

    def check(self, mask: Any) -> None:
        """Compare a mask, and choose one of its ids."""
        assert self.row.error is None
        expected = self.expected()
        assert np.array_equal(mask, expected)
        if self._matcher.ended:
            return
        self.choose(int(self._rng.choice(allowed_ids(expected[0]))))

    def choose_again(self, token_id: int) -> None:
        """Choose an id after the end, as a row does that goes on."""
        advance(self._service, self.row, (token_id,))

    @property
    def ended(self) -> bool:
        """True once its output is complete."""
        return self._matcher.ended

    def choose(self, *token_ids: int) -> None:
        """Choose ids that are allowed."""
        self._matcher.advance(token_ids)
        advance(self._service, self.row, token_ids)


def slots_of(*followers: Follower) -> Any:
    """Their slots, intp [followers]."""
    return np.array([each.row.slot for each in followers], np.intp)


def ask(service: GrammarService, *followers: Follower) -> Any:
    """Ask for their masks; returns their slots."""
    slots = slots_of(*followers)
    service.rows.ask(slots, {})
    return slots


def finish(service: GrammarService, slots: Any) -> None:
    """Wait until masks that were asked for are there."""
    while not service.rows.are_done(slots).all():
        service.rows.wait(HANG_S)


def step(service: GrammarService, *followers: Follower) -> None:
    masks = served_masks(service, [(each.row, ()) for each in followers])
    for follower, mask in zip(followers, masks, strict=True):
        follower.check(mask)
