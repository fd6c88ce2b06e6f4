"""`MaskMemory`: memory that the engine's process shares with the workers: requests for masks of rows, and masks.

Each row has a slot, and each fact of a slot a column. The engine writes what it asks and then the request's number; the
worker that follows the row writes the masks and then the same number as answered. So a request costs no message.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

MOST_WORKERS = 512

GOES_ON, ENDED, STUCK = 0, 1, 2
"""States of a row: its output goes on, is complete, or can't go on; of the last, a message has told the reason."""

NO_RING = -1

MOST_TOKENS = 32  # of a request; a row with more is followed anew

_ID_BITS, _NUMBERS, _WRITTEN = 32, (1 << 30) - 1, 1 << 30  # memory that nobody has written is 0
_VALUES = (1 << _ID_BITS) - 1
_LOCK = threading.Lock()
_Scalar = TypeVar("_Scalar", bound=np.generic)


def fence() -> None:
    """Order what was read and written before among all processes: a lock that is let go of and taken again does so."""
    with _LOCK:
        pass
    with _LOCK:
        pass


def entry_of(number: int, value: int) -> int:
    """An entry of `MaskMemory.forced` and `known`: an answer's number, and in the lower bits a token's id or a line."""
    return (number & _NUMBERS | _WRITTEN) << _ID_BITS | value


class MaskMemory:
    """An unnamed file that all these processes map; a `descriptor` of None makes one. Memory is used as it is written.

    Attributes:
        working: int64 [workers], what each works on: the key of a row, below 0 the number of a grammar, or 0.
        progress: int64 [workers], how many things each has worked on.
        sleeping: int64 [workers], 1 while a worker waits for a message.
        keys: int64 [slots], the key of the row that a request is about; see `messages.Follow`.
        asked: int64 [slots], the number of the last request, written last by the engine.
        answered: int64 [slots], the number of the last answer, written last by the worker.
        states: int32 [slots], GOES_ON, ENDED or STUCK, with the last answer.
        num_tokens, num_drafts: int32 [slots], of the last request.
        tokens: int32 [slots, MOST_TOKENS], ids sampled since the request before.
        drafts: int32 [slots, most_drafts], proposed next tokens.
        forced: int64 [slots, MOST_TOKENS], tokens from an answer on that are certain, as the grammar allows no others;
            see `entry_of`. The worker finds more of them meanwhile, and may write them when the slot is another
            row's.
        known: int64 [slots], the line of the row's state after the last answer, as an entry like those of `forced`.
        masks: uint32 [slots + lines, words], of each slot the mask of the next token, empty if the row is stuck; then
            of each line that of a known state.
        after: int16 [lines, 32 * words], of a line of a known state the state after each token, by its place among the
            MOST_STATES lines of its grammar; below 0 where that is not known.
        versions: int64 [lines], this process's own: greater for each grammar that has had a line.
        mask_indices: intp [slots], this process's own: of the mask of each slot's next token in `masks`.
        masks_after_drafts: uint32 [slots, most_drafts, words].
        ring: the descriptor of an eventfd, each write to which wakes all workers that sleep; NO_RING where the system
            has none.
    """

    def __init__(
        self, num_words: int, num_slots: int, most_drafts: int, descriptor: int | None = None, *, num_lines: int = 0,
        ring: int = NO_RING,
    ) -> None:  # fmt: skip
        self.descriptor, self.ring = _unnamed_file() if descriptor is None else descriptor, ring
        if descriptor is None and hasattr(os, "eventfd"):  # Linux
            self.ring = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_new, self._end = descriptor is None, 0
        self.working, self.progress, self.sleeping = (self._column(np.int64, MOST_WORKERS) for _ in range(3))
        self.keys, self.asked, self.answered, self.known = (self._column(np.int64, num_slots) for _ in range(4))
        self.states, self.num_tokens, self.num_drafts = (self._column(np.int32, num_slots) for _ in range(3))
        self.tokens = self._column(np.int32, num_slots, MOST_TOKENS)
        self.forced = self._column(np.int64, num_slots, MOST_TOKENS)
        self.drafts = self._column(np.int32, num_slots, most_drafts)
        self.after = self._column(np.int16, num_lines, 32 * num_words)
        self.masks = self._column(np.uint32, num_slots + num_lines, num_words)
        self.masks_after_drafts = self._column(np.uint32, num_slots, most_drafts, num_words)
        self.versions = np.zeros(num_lines, np.int64)
        self.mask_indices = np.arange(num_slots)
        self._forced: memoryview[int] = self.forced.data  # single cells of arrays take several times as long
        self._known: memoryview[int] = self.known.data
        self._answered: memoryview[int] = self.answered.data

    def _column(self, dtype: type[_Scalar], *shape: int) -> NDArray[_Scalar]:
        """Map the next part of the file, which begins with a page."""
        size_bytes, start = np.dtype(dtype).itemsize * math.prod(shape), self._end
        if not size_bytes:
            return np.empty(shape, dtype)
        self._end += -(-size_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        if self._is_new:
            os.ftruncate(self.descriptor, self._end)
        return np.frombuffer(mmap.mmap(self.descriptor, size_bytes, offset=start), dtype).reshape(shape)

    @property
    def num_slots(self) -> int:
        return len(self.keys)

    @property
    def most_drafts(self) -> int:
        return int(self.drafts.shape[1])

    def of(self, slot: int, num_drafts: int) -> NDArray[np.uint32]:
        """A row's masks, uint32 [drafts + 1, words]; a view if it has no drafts."""
        index = int(self.mask_indices[slot])
        first = self.masks[index : index + 1]
        return np.concatenate((first, self.masks_after_drafts[slot, :num_drafts])) if num_drafts else first

    def forced_token(self, slot: int, place: int) -> int:
        """The certain token at a place after a row's last answer; -1 where it is not known."""
        if place >= MOST_TOKENS:
            return -1
        entry = self._forced[slot, place]
        return entry & _VALUES if self._is_of_answer(entry, slot) else -1

    def certain_after(self, slot: int, count: int) -> int:
        """The certain token after `count` > 0 tokens since a row's last answer; -1 unless it and the one before are."""
        if count >= MOST_TOKENS:
            return -1
        forced, answer = self._forced, self._answered[slot] & _NUMBERS | _WRITTEN
        entry = forced[slot, count]
        is_certain = entry >> _ID_BITS == answer == forced[slot, count - 1] >> _ID_BITS
        return entry & _VALUES if is_certain else -1

    def known_line(self, slot: int) -> int:
        """The line of the state after a row's last answer; -1 where it is not known."""
        entry = self._known[slot]
        line = entry & _VALUES
        return line if self._is_of_answer(entry, slot) and line < len(self.after) else -1

    def _is_of_answer(self, entry: int, slot: int) -> bool:
        return entry >> _ID_BITS == self._answered[slot] & _NUMBERS | _WRITTEN

    def close(self) -> None:
        """Close the file; its parts are mapped until their last views are freed. Idempotent."""
        for descriptor in (self.descriptor, self.ring):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor, self.ring = -1, NO_RING


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("realizar-masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
