"""`Questions` puts rows before the processes that follow them: by a message when that begins, then in shared memory."""

from __future__ import annotations

import itertools
import select
import time

import numpy as np
from numpy.typing import NDArray

from realizar.structured.workers.bell import Bell
from realizar.structured.workers.followed import FollowedRow
from realizar.structured.workers.mask_memory import STUCK, MaskMemory, fence
from realizar.structured.workers.messages import Stuck
from realizar.structured.workers.worker import GrammarWorker

_LOOK_MS = 1.0


class Questions:
    """Writes questions. Any thread may, about rows that no other thread asks about.

    Args:
        memory: the shared memory.
        bell: wakes the processes.
        step_s: seconds in which a process must answer.
    """

    def __init__(self, memory: MaskMemory, bell: Bell, step_s: float) -> None:
        self.memory, self.bell, self.step_s = memory, bell, step_s
        self._keys = itertools.count()

    def follow(self, row: FollowedRow, worker: GrammarWorker) -> None:
        """Have a process follow a row, its output so far taken in. Raises WorkerDiedError."""
        if row.worker is not None:
            row.worker.leave(row.key)
            row.worker = None
        row.key = next(self._keys)
        worker.follow(row.key, row.slot, row.output)
        row.worker = worker
        memory, slot = self.memory, row.slot
        memory.keys[slot], memory.num_tokens[slot] = row.key, 0

    def name_drafts(self, row: FollowedRow) -> None:
        """Let the row's next question be about its drafts too."""
        memory, count = self.memory, len(row.drafts)
        memory.num_drafts[row.slot] = count
        memory.drafts[row.slot, :count] = row.drafts

    def post(self, slots: NDArray[np.intp]) -> None:
        """Let what was written be the next question of rows; their processes are to be woken."""
        fence()
        self.memory.asked[slots] += 1
        fence()

    def answer_for(self, slots: NDArray[np.intp]) -> None:
        """Take the last questions of rows for answered: their process has ended."""
        self.memory.answered[slots] = self.memory.asked[slots]

    def follow_alone(self, row: FollowedRow, worker: GrammarWorker) -> None:
        """Have a process that nobody else uses follow a row, and wait for its masks.

        Raises:
            WorkerDiedError: it crashed, or took too much time.
        """
        slot = np.array([row.slot])
        try:
            self.follow(row, worker)
            self.name_drafts(row)
            self.post(slot)
            if self.bell.rings:
                self.bell.ring()
            else:
                worker.look()
            self._await(row, worker)
        except BaseException:
            self.answer_for(slot)
            raise

    def _await(self, row: FollowedRow, worker: GrammarWorker) -> None:
        memory, slot, end_s = self.memory, row.slot, time.monotonic() + self.step_s
        poll = select.poll()
        poll.register(worker.fileno(), select.POLLIN)
        while memory.answered[slot] != memory.asked[slot] or (memory.states[slot] == STUCK and row.error is None):
            for news in worker.take_news() if poll.poll(_LOOK_MS) else ():
                if isinstance(news, Stuck) and news.key == row.key:
                    row.fail(news.reason, "request")
            if time.monotonic() > end_s:
                raise worker.late(self.step_s)
