"""`SamplingKernel`: calls the sampling kernel on a team of threads."""

from __future__ import annotations

import numpy as np

from realizar.backends.cpu.kernels.sampling.adjust import adjust
from realizar.backends.cpu.kernels.sampling.logprobs import score
from realizar.backends.cpu.kernels.sampling.record import SAMPLE, scratch_bytes
from realizar.backends.cpu.kernels.sampling.sample import sample
from realizar.backends.cpu.kernels.sampling.truncate import draw_row
from realizar.backends.cpu.operations import BoundOperation, BoundProgram
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.threads import ThreadTeam

SAMPLING_KERNELS = (draw_row, sample, adjust, score)


class SamplingKernel:
    """The kernel, and its scratch for each thread."""

    def __init__(self, vocab_size: int, team: ThreadTeam) -> None:
        self.vocab_size, self.team = vocab_size, team
        each = scratch_bytes(vocab_size)
        self._scratch = aligned_zeros(team.size * each, np.uint8)
        self._next = aligned_zeros(1, np.int64)
        values: dict[str, int | float] = {
            "runs": 0, "count": 0, "next": address(self._next), "vocab": vocab_size, "stride": 0,
            "scratch": address(self._scratch), "scratch_bytes": each,
            "adjust": adjust.address, "draw": draw_row.address, "score": score.address,
        }  # fmt: skip
        self._arguments = SAMPLE.pack(values)
        self._program = BoundProgram([BoundOperation("sampling", sample, self._arguments)])

    def run(self, runs_at: int, count: int, stride: int) -> None:
        """Read runs, int64 [count, fields of a run], of logits `stride` bytes apart; StepError: the kernel failed."""
        self._next[0] = 0
        for name, value in (("runs", runs_at), ("count", count), ("stride", stride)):
            self._arguments[SAMPLE[name]] = value
        self.team.run(self._program.at, self._program.count)
