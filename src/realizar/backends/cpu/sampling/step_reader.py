"""`StepReader`: reads the logits of a step that its rows want. numpy only.

Most rows want the largest logit and nothing else: these are chosen here, without a reader of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.sampling.logit_reader import LogitReader
from realizar.backends.cpu.sampling.sampler import RowSampler
from realizar.batch import NO_CHOICE, StepRows


class StepReader:
    """Reads the wanted logits of one step, in the order of `tokens`.

    Args:
        columns: the step's rows.
        samplers: by row.
        masks: by row uint32 [words] or [drafts + 1, words], the ids allowed for each choice.

    Attributes:
        tokens: indices in the step of the tokens whose logits are wanted.
        choices: int32 [rows, 1 + drafts], of the rows that take the largest logit; room for those of all others.
        readers: of all other rows that want anything, by their index.
    """

    def __init__(
        self, columns: StepRows, samplers: Mapping[int, RowSampler], masks: Mapping[int, NDArray[np.uint32]]
    ) -> None:
        self._columns, self._samplers, self._masks = columns, samplers, masks
        self._numbers: list[int] = columns.numbers.tolist()
        self.choices = np.full((len(columns), 1 + int(columns.num_drafts.max(initial=0))), NO_CHOICE, np.int32)
        self.readers: dict[int, LogitReader] = {}
        self.tokens: list[int] = []
        self._owners: list[int] = []  # index of the row that wants each of `tokens`
        ends = columns.starts[1:].tolist()
        chooses = set((columns.samples & (columns.num_tokens > 0)).nonzero()[0].tolist())
        for index in sorted(chooses.union(columns.logprob_queries, columns.pooling)):
            if index in chooses and self._takes_largest(index):
                self.tokens.append(ends[index] - 1)
                self._owners.append(index)
            else:
                self._add_reader(index, samplers[self._numbers[index]] if index in chooses else None)

    def read(self, first: int, logits: NDArray[np.float32]) -> None:
        """Take in the logits of `tokens` from `first` on, float32 [some, vocab]."""
        for index, values in zip(self._owners[first : first + len(logits)], logits, strict=True):
            reader = self.readers.get(index)
            if reader is None:
                reader = self._choose_largest(index, values)
            if reader is not None:
                reader.read(values)

    def _takes_largest(self, index: int) -> bool:
        columns, number = self._columns, self._numbers[index]
        if columns.num_drafts[index] or index in columns.logprob_queries or index in columns.pooling:
            return False
        return number not in self._masks and self._samplers[number].takes_largest

    def _add_reader(self, index: int, sampler: RowSampler | None) -> None:
        reader = self.readers[index] = self._new_reader(index, sampler)
        self.tokens += reader.tokens
        self._owners += [index] * len(reader.tokens)

    def _new_reader(self, index: int, sampler: RowSampler | None) -> LogitReader:
        start = int(self._columns.starts[index])
        return LogitReader(self._columns.row(index), start, sampler, self._masks.get(self._numbers[index]))

    def _choose_largest(self, index: int, logits: NDArray[np.float32]) -> LogitReader | None:
        """Choose, unless the largest logit is not finite: then the row's reader, which fails."""
        best = int(logits.argmax())  # of NaNs the first
        sampler = self._samplers[self._numbers[index]]
        if not math.isfinite(logits[best]):
            reader = self.readers[index] = self._new_reader(index, sampler)
            return reader
        sampler.accept(best)
        self.choices[index, 0] = best
        return None
