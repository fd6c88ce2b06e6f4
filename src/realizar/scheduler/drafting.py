"""`Drafting`: the scheduler's side of drafts. It asks the drafter, keeps its faults from requests, and counts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListOf
from contextlib import contextmanager
from itertools import takewhile

from realizar.errors import InvalidRequestError
from realizar.scheduler.drafts import Drafter
from realizar.scheduler.sequence import Sequence

_LOG = logging.getLogger(__name__)


class Drafting:
    """Owns the drafter. A drafter that raises is not asked again: texts are the same without drafts.

    Attributes:
        num_drafts, num_accepted: tokens drafted and verified so far, and those of them that were right.

    Args:
        drafter: None drafts nothing.
        most_drafts: drafts of a sequence that the backend has room for.
        vocab_size: ids of the vocabulary are below it.

    Raises:
        InvalidRequestError: there is a drafter, and room for no draft.
    """

    def __init__(self, drafter: Drafter | None, most_drafts: int, vocab_size: int) -> None:
        if drafter is not None and most_drafts < 1:
            message = f"a drafter needs speculative_tokens of at least 1, not {most_drafts}"
            raise InvalidRequestError(message, "speculative_tokens")
        self._drafter, self._most_drafts, self._vocab_size = drafter, most_drafts, vocab_size
        self.num_drafts = self.num_accepted = 0

    def awaits(self, sequences: Iterable[Sequence]) -> bool:
        """True if drafts may follow a step over these sequences, so that its results are awaited.

        Sequences that all read their prompts, with more than one token to go, can have no drafts yet.
        """
        if self._drafter is None or not self._drafter.awaits_results:
            return False
        return any(sequence.num_remaining_tokens <= 1 for sequence in sequences)

    @property
    def is_on(self) -> bool:
        """True if drafts may be proposed."""
        return self._drafter is not None

    def propose(self, going: ListOf[Sequence]) -> None:
        """Have drafts proposed, in one call, for sequences that go on from a known token and have room for a draft."""
        if self._drafter is None or not going:
            return
        with self._faults():
            for sequence, drafts in zip(going, self._drafter.propose(going), strict=True):
                sequence.drafts = self._usable(sequence, drafts)

    def verified(self, sequences: Iterable[Sequence], num_drafts: ListOf[int], num_accepted: ListOf[int]) -> None:
        """Drafts of sequences came back with a step, so many of each, and so many were right."""
        self.num_drafts += sum(num_drafts)
        self.num_accepted += sum(num_accepted)
        if self._drafter is not None:
            with self._faults():
                for sequence, drafts, accepted in zip(sequences, num_drafts, num_accepted, strict=True):
                    self._drafter.verified(sequence, drafts, accepted)

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        if self._drafter is not None:
            with self._faults():
                self._drafter.forget(sequence.sequence_id)

    def _usable(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Drafts that the backend has room for and the request wants, before the first one beyond the vocabulary."""
        most = min(self._most_drafts, sequence.max_drafts)
        return tuple(takewhile(lambda token_id: 0 <= token_id < self._vocab_size, drafts[:most]))

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Drop a drafter that raises."""
        try:
            yield
        except Exception:  # noqa: BLE001 - a fault of what is only to be faster
            _LOG.exception("no more drafts are proposed")
            self._drafter = None
