"""`StepRuns`: what the sampling kernel reads and writes of one step, and the same of steps of decodes, made once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.sampling.record import RUN
from realizar.backends.cpu.records import address
from realizar.batch import NOT_SAMPLED

ALL = -1  # in place of a query's number: the run has a row's sampled tokens


class StepRuns:
    """Runs of a step's sampled tokens, then of its queries, and what the kernel finds for each.

    Attributes:
        owners: [runs], index in the step of each one's row.
        queries: int64 [runs], the number of the row's query, or ALL.
        runs: int64 [runs, fields of a run]. faults: int64 [runs].
        made: int64 [rows], tokens that each row has sampled.
        starts: int64 [runs + 1], the number of wanted tokens before each run.
        ids_at, values_at: int64 [runs + 1], where the log-probabilities of each run begin.
        ids, values: int32 and float64, the log-probabilities of all runs.
    """

    def __init__(
        self, owners: NDArray[np.integer], queries: NDArray[np.int64], runs: NDArray[np.int64],
        made: NDArray[np.int64], faults: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Runs that name their counts, and nothing yet of what is found."""
        runs[:, RUN["fault"]] = address(faults) + 8 * np.arange(len(runs))
        self.owners, self.queries, self.runs, self.made, self.faults = owners, queries, runs, made, faults
        self.starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(runs[:, RUN["count"]])))
        self.ids_at = self.values_at = np.zeros(len(runs) + 1, np.int64)
        self.ids, self.values = np.empty(0, np.int32), np.empty(0, np.float64)

    def give_lines(self, wanted: NDArray[np.bool_], top_n: NDArray[np.int64]) -> None:
        """Give runs that want log-probabilities, bool [runs], room for `top_n`, int64 [runs], of each token."""
        self.runs[:, RUN["top_n"]] = top_n
        lines = np.where(wanted, self.runs[:, RUN["count"]], 0)
        self.ids_at = np.concatenate((np.zeros(1, np.int64), np.cumsum(lines * (2 + top_n))))
        self.values_at = np.concatenate((np.zeros(1, np.int64), np.cumsum(lines * (1 + top_n))))
        self.ids = np.empty(int(self.ids_at[-1]), np.int32)
        self.values = np.empty(int(self.values_at[-1]), np.float64)
        self.runs[:, RUN["ids"]] = address(self.ids) + 4 * self.ids_at[:-1]
        self.runs[:, RUN["values"]] = address(self.values) + 8 * self.values_at[:-1]


class DecodeRuns:
    """The runs of a step of decodes, which later steps of as many rows use again.

    Only what differs from the step before is written: positions in every step, the rows where they are others.

    Attributes:
        at: address of the runs.
        sampled: int32 [rows, 1], those of the step; NOT_SAMPLED where a row has none.
        tokens: int64 [rows], indices in the step of the tokens whose logits are wanted.
    """

    def __init__(self, count: int) -> None:
        self.tokens = np.arange(count)
        runs = np.zeros((count, len(RUN.names)), np.int64)
        runs[:, RUN["count"]] = 1
        self._found = np.zeros(2 * count, np.int64)
        made, faults = self._found[:count], self._found[count:]
        self.step = StepRuns(self.tokens, np.full(count, ALL, np.int64), runs, made, faults)
        self.at = address(runs)
        self.sampled = np.empty((count, 1), np.int32)
        runs[:, RUN["made"]] = address(made) + 8 * self.tokens
        runs[:, RUN["sampled"]] = address(self.sampled) + 4 * self.tokens
        self._numbers: NDArray[np.intp] | None = None
        self._version = -1
        self._logprobs = np.full(count, -1, np.int64)  # for which the runs have room for lines
        self._logits: tuple[int, int] | None = None  # address and stride of those that all runs name
        self._has_masks = False

    def names(self, numbers: NDArray[np.intp], version: int) -> bool:
        """True if these rows are named: the same array, never written, and the same version of what rows hold."""
        return numbers is self._numbers and version == self._version

    def name_rows(
        self, numbers: NDArray[np.intp], version: int, addresses: NDArray[np.int64], logprobs: NDArray[np.int64]
    ) -> None:
        """Name the rows of a step; `addresses` and `logprobs` are those of `SamplingRows`, int64 [rows]."""
        self._numbers, self._version = numbers, version
        self.step.runs[:, RUN["row"]] = addresses
        if not np.array_equal(logprobs, self._logprobs):
            self.step.give_lines(logprobs >= 0, np.maximum(logprobs, 0))
            self._logprobs = logprobs

    def begin(self, positions: NDArray[np.int32]) -> None:
        """Begin a step, of which nothing is found yet, with the positions of its tokens, [rows]."""
        self._found.fill(0)
        self.sampled.fill(NOT_SAMPLED)
        self.step.runs[:, RUN["position"]] = positions

    def place_masks(self, masks: Mapping[int, int]) -> None:
        """Let runs read masks of their tokens, by the run's index at these addresses, and others none."""
        if self._has_masks:
            self.step.runs[:, RUN["mask"]] = 0
        for index, at in masks.items():
            self.step.runs[index, RUN["mask"]] = at
        self._has_masks = bool(masks)

    def place_logits(self, first: int, count: int, at: int, stride: int) -> None:
        """Let runs from `first` on read logits that lie `stride` bytes apart."""
        where = (at, stride) if count == len(self.tokens) else None
        if where is None or where != self._logits:
            self.step.runs[first : first + count, RUN["logits"]] = at + stride * self.tokens[:count]
        self._logits = where
