"""`OpenSequences`: every sequence that has not ended, by request, and whether it waits or runs."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from realizar.kv_cache.block_keys import BlockKeys
from realizar.request import Request
from realizar.scheduler.policy import order
from realizar.scheduler.sequence import Sequence


class OpenSequences:
    """Owns the lists; the scheduler decides which sequences move between them.

    Attributes:
        waiting, running: sorted by `policy.order`; a preempted sequence waits.
        preempted: those that wait and have a row.
        requests: by request id and choice.

    Args:
        block_size: tokens per KV block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ids: Iterator[int] = itertools.count()
        self._sequences: dict[int, Sequence] = {}
        self.requests: dict[str, dict[int, Sequence]] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preempted: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, sequence_id: int) -> Sequence | None:
        """The sequence, unless it has ended."""
        return self._sequences.get(sequence_id)

    @property
    def num_queued_requests(self) -> int:
        """Requests of which a choice waits for its first step."""
        return len({sequence.request.request_id for sequence in self.waiting if sequence.row is None})

    def add(self, request: Request) -> None:
        """Queue every choice of a request, or none if one of them can't be made."""
        choices = {choice: self._sequence(request, choice) for choice in range(request.sampling.n)}
        self.requests[request.request_id] = choices
        for sequence in choices.values():
            self._sequences[sequence.sequence_id] = sequence
            bisect.insort(self.waiting, sequence, key=order)

    def _sequence(self, request: Request, choice: int) -> Sequence:
        keys = BlockKeys(self._block_size, request.cache_salt)
        return Sequence(next(self._ids), request, choice, keys)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence from waiting to running."""
        self.waiting.remove(sequence)
        self.preempted.discard(sequence)
        sequence.running = True
        bisect.insort(self.running, sequence, key=order)

    def stop(self, sequence: Sequence) -> None:
        """Move a sequence from running to waiting."""
        self.running.remove(sequence)
        sequence.running = False
        self.preempted.add(sequence)
        bisect.insort(self.waiting, sequence, key=order)

    def forget_row(self, sequence: Sequence) -> None:
        """Note that a waiting sequence has no row any more."""
        sequence.row = None
        self.preempted.discard(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended."""
        (self.running if sequence.running else self.waiting).remove(sequence)
        self.preempted.discard(sequence)
        del self._sequences[sequence.sequence_id]
        choices = self.requests[sequence.request.request_id]
        del choices[sequence.choice]
        if not choices:
            del self.requests[sequence.request.request_id]

    def audit(self) -> list[int]:
        """Prove that every sequence is in the list where it belongs.

        Returns:
            The rows of open sequences.

        Raises:
            RuntimeError: one is lost, in the wrong list, or without a row.
        """
        if any(sequence.row is None for sequence in self.running):
            raise RuntimeError("a running sequence has no row of its own")
        if not all(s.running for s in self.running) or any(s.running for s in self.waiting):
            raise RuntimeError("a sequence is in the wrong list")
        if self.preempted != {sequence for sequence in self.waiting if sequence.row is not None}:
            raise RuntimeError("a sequence that waits is taken for preempted, or is and is not")
        for listed in (self.running, self.waiting):
            if sorted(listed, key=order) != listed:
                raise RuntimeError("a list of sequences is out of order")
        ids = [sequence.sequence_id for sequence in (*self.running, *self.waiting)]
        by_request = [sequence.sequence_id for choices in self.requests.values() for sequence in choices.values()]
        if sorted(ids) != sorted(self._sequences) or sorted(by_request) != sorted(ids):
            raise RuntimeError("a sequence is lost or listed twice")
        return [sequence.row for sequence in self._sequences.values() if sequence.row is not None]
