"""`OutputEnds`: the ids that end the outputs of open rows, looked up for all choices of a step with drafts. numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.sampling_params import SamplingParams


class OutputEnds:
    """The stop ids of open rows.

    One array says of each id how many rows have it as a stop id, so that Python looks only at rows which chose such an
    id, of their own or of another row.
    """

    def __init__(self, vocab_size: int) -> None:
        self._num_rows = np.zeros(vocab_size, np.int32)
        self._samplings: dict[int, SamplingParams] = {}

    def open(self, row: int, sampling: SamplingParams) -> None:
        """Start a row."""
        self.close(row)
        self._samplings[row] = sampling
        self._num_rows[self._ids(sampling)] += 1

    def close(self, row: int) -> None:
        """Forget a row, if it is open."""
        sampling = self._samplings.pop(row, None)
        if sampling is not None:
            self._num_rows[self._ids(sampling)] -= 1

    def up_to_end(
        self, numbers: NDArray[np.intp], choices: NDArray[np.int32], num_outputs: NDArray[np.int64]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Choices that each row keeps, intp [rows], and true where the last of them ends its output, bool [rows].

        A row's choices end before the first below 0, and with one that is a stop id of the row, late enough.

        Args:
            numbers: intp [rows]. choices: int32 [rows, 1 + drafts]. num_outputs: int64 [rows], tokens before these.
        """
        unmade = choices < 0
        counts = np.where(unmade.any(axis=1), unmade.argmax(axis=1), choices.shape[1])
        ended = np.zeros(len(numbers), np.bool_)
        may_end = self._num_rows[np.where(unmade, 0, choices)] > 0
        may_end &= np.arange(choices.shape[1]) < counts[:, None]
        for index in np.flatnonzero(may_end.any(axis=1)).tolist():
            sampling = self._samplings[int(numbers[index])]
            token_ids = choices[index, : counts[index]].tolist()
            kept = _up_to_end(token_ids, sampling, int(num_outputs[index]))
            if kept is not None:
                counts[index], ended[index] = kept, True
        return counts, ended

    def _ids(self, sampling: SamplingParams) -> list[int]:
        """Stop ids that the vocabulary has, each once."""
        return [token_id for token_id in set(sampling.stop_token_ids) if 0 <= token_id < len(self._num_rows)]


def _up_to_end(token_ids: list[int], sampling: SamplingParams, num_outputs: int) -> int | None:
    """The number of choices up to one that ends the output; None where none does.

    A grammar may end the output before `min_tokens`.
    """
    least = 0 if sampling.structured is not None else sampling.min_tokens
    for index, token_id in enumerate(token_ids):
        if num_outputs + index + 1 > least and token_id in sampling.stop_token_ids:
            return index + 1
    return None
