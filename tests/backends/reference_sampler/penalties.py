"""Changes of single logits before the temperature: bias, repetition, presence and frequency penalties. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.backends.row_faults import check_logit_bias
from realizar.sampling_params import SamplingParams

_LARGEST = float(np.finfo(np.float32).max)


def store(logits: NDArray[np.float32], ids: NDArray[np.intp], values: NDArray[np.float64]) -> None:
    """Write adjusted values, bounded to finite float32; a logit that is not, such as a forbidden id's, stays so."""
    bounded = np.maximum(np.minimum(values, _LARGEST), -_LARGEST)
    before = logits[ids]
    logits[ids] = np.where(np.isfinite(before), bounded, before)


class LogitBias:
    """Numbers added to the logits of single ids. Immutable.

    Raises:
        InvalidRequestError: an id lies beyond the vocabulary.
    """

    def __init__(self, sampling: SamplingParams, vocab_size: int) -> None:
        check_logit_bias(sampling, vocab_size)
        self.active = bool(sampling.logit_bias)
        self._ids = np.fromiter(sampling.logit_bias.keys(), np.intp)
        self._bias = np.fromiter(sampling.logit_bias.values(), np.float64)

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Add the bias in place."""
        store(logits, self._ids, logits[self._ids].astype(np.float64) + self._bias)


class Penalties:
    """Counts of the ids seen in a row, and the penalties on them.

    Repetition (Keskar et al., "CTRL", 2019, and its sign rule as in Hugging Face): a logit above 0 is divided by the
    penalty, any other is multiplied, for every id in prompt or output. Then, for ids in the output alone,
    `presence_penalty + frequency_penalty * count` is subtracted. All is derived from token ids, so a row rebuilt from
    its history continues as it was.
    """

    def __init__(
        self, sampling: SamplingParams, history: Sequence[int], num_prompt_tokens: int, vocab_size: int
    ) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self.active = self._repetition != 1.0 or self._presence != 0.0 or self._frequency != 0.0
        self._vocab_size = vocab_size
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, np.intp)
        self._counts = np.zeros(64, np.float64)  # in the output
        if self.active:
            if self._repetition != 1.0:
                for token_id in history[:num_prompt_tokens]:
                    self._slot(token_id)
            for token_id in history[num_prompt_tokens:]:
                self.accept(token_id)

    def _slot(self, token_id: int) -> int | None:
        if not 0 <= token_id < self._vocab_size:
            return None  # a placeholder for embeddings given in place of a token
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == self._ids.size:
            self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token_id
        return slot

    def accept(self, token_id: int) -> None:
        """Count a token of the output."""
        if self.active and (slot := self._slot(token_id)) is not None:
            self._counts[slot] += 1.0

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Penalise in place."""
        size = len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        values = logits[ids].astype(np.float64)
        if self._repetition != 1.0:
            values = np.where(values > 0.0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts + self._presence * (counts > 0.0)
        store(logits, ids, values)
