"""`StepRuns`: what the sampling kernel reads and writes of one step, and the same of steps of decodes, made once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.sampling import record
from realizar.backends.cpu.kernels.sampling.record import RUN
from realizar.backends.cpu.records import address

ALL = -1  # in place of a query's number: the run has a row's choices


@dataclass(slots=True, eq=False)
class StepRuns:
    """Runs of a step's choices, then of its queries, and what the kernel finds for each.

    Attributes:
        owners: [runs], index in the step of each one's row.
        queries: int64 [runs], the number of the row's query, or ALL.
        runs: int64 [runs, fields of a run].
        faults: int64 [runs, 2], a fault and the bits of a logit.
        made: int64 [rows], choices that each row has made.
        starts: int64 [runs + 1], the number of wanted tokens before each run.
        ids_at, values_at: int64 [runs + 1], where the log-probabilities of each run begin.
        ids, values: int32 and float64, the log-probabilities of all runs.
    """

    owners: NDArray[np.integer]
    queries: NDArray[np.int64]
    runs: NDArray[np.int64]
    faults: NDArray[np.int64]
    made: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids_at: NDArray[np.int64]
    values_at: NDArray[np.int64]
    ids: NDArray[np.int32]
    values: NDArray[np.float64]

    @classmethod
    def of(
        cls, owners: NDArray[np.integer], queries: NDArray[np.int64], runs: NDArray[np.int64], num_rows: int
    ) -> StepRuns:
        """Runs that name their rows and counts, and nothing yet of what is found."""
        faults, made = np.zeros((len(runs), 2), np.int64), np.zeros(num_rows, np.int64)
        runs[:, RUN["fault"]] = address(faults) + 16 * np.arange(len(runs))
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(runs[:, record.RUN_COUNT])))
        nowhere = np.zeros(len(runs) + 1, np.int64)
        ids, values = np.empty(0, np.int32), np.empty(0, np.float64)
        return cls(owners, queries, runs, faults, made, starts, nowhere, nowhere, ids, values)

    @classmethod
    def of_decodes(cls, count: int) -> StepRuns:
        """Those of `count` rows that make one choice each."""
        each, runs = np.arange(count), np.zeros((count, len(RUN.names)), np.int64)
        runs[:, record.RUN_COUNT] = 1
        made = cls.of(each, np.full(count, ALL, np.int64), runs, count)
        runs[:, RUN["made"]] = address(made.made) + 8 * each
        return made

    def give_lines(self, wanted: NDArray[np.bool_], top_n: NDArray[np.int64]) -> None:
        """Give the runs that want log-probabilities, bool [runs], room for those of each of their tokens.

        Args:
            top_n: int64 [runs], most probable ids wanted.
        """
        self.runs[:, record.RUN_TOP_N] = top_n
        lines = np.where(wanted, self.runs[:, record.RUN_COUNT], 0)
        self.ids_at = np.concatenate((np.zeros(1, np.int64), np.cumsum(lines * (2 + top_n))))
        self.values_at = np.concatenate((np.zeros(1, np.int64), np.cumsum(lines * (1 + top_n))))
        self.ids = np.empty(int(self.ids_at[-1]), np.int32)
        self.values = np.empty(int(self.values_at[-1]), np.float64)
        self.runs[:, RUN["ids"]] = address(self.ids) + 4 * self.ids_at[:-1]
        self.runs[:, RUN["values"]] = address(self.values) + 8 * self.values_at[:-1]


class DecodeRuns:
    """Runs of steps of decodes by their number of rows. A step's are good until the next step of as many rows."""

    def __init__(self) -> None:
        self._runs: dict[int, StepRuns] = {}
        self._logprobs: dict[int, NDArray[np.int64]] = {}  # by rows, those for which the runs have room for lines

    def take(self, logprobs: NDArray[np.int64]) -> StepRuns:
        """The runs of a step, of which nothing is found yet.

        Args:
            logprobs: int64 [rows], most probable ids that each row wants; -1 for none and no log-probability.
        """
        count = len(logprobs)
        runs = self._runs.get(count)
        if runs is None:
            runs = self._runs[count] = StepRuns.of_decodes(count)
            self._logprobs[count] = np.full(count, -1, np.int64)
        if not np.array_equal(logprobs, self._logprobs[count]):
            runs.give_lines(logprobs >= 0, np.maximum(logprobs, 0))
            self._logprobs[count] = logprobs
        runs.made.fill(0)
        runs.faults.fill(0)
        return runs
