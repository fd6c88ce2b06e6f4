"""`KernelSampler`: one row of the CPU's sampling kernel, behind the interface of the reference's `RowSampler`."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from backends.reference_sampler.sampler import SampledToken
from realizar.backends.cpu.codegen.logit_blocks import BLOCK
from realizar.backends.cpu.kernels.sampling.record import ROW
from realizar.backends.cpu.sampling.kernel import SamplingKernel
from realizar.backends.cpu.sampling.rows import SamplingRows
from realizar.backends.cpu.sampling.step_sampler import StepSampler
from realizar.backends.cpu.threads import ThreadTeam
from realizar.batch import LogprobQuery, OpenedRow
from realizar.errors import InvalidRequestError, RealizarError
from realizar.outputs import RowError, TokenLogprobs
from step_inputs import scheduled_row, step_rows

CONTEXT = 4096


@cache
def one_thread() -> ThreadTeam:
    return ThreadTeam(1)


@cache
def sampling_kernel(vocab_size: int) -> SamplingKernel:
    """The kernel on the calling thread alone."""
    return SamplingKernel(vocab_size, one_thread())


def raised(error: RowError) -> RealizarError:
    """The exception that the reference raises in place of a row's error."""
    return RealizarError(error.message) if error.param is None else InvalidRequestError(error.message, error.param)


def kernel_logprobs(logits: NDArray[np.float32], token_id: int | None, top_n: int) -> TokenLogprobs:
    """`token_logprobs` by the kernel, as of a prompt's token."""
    row = scheduled_row(0, (0,), 0, logprob_queries=(LogprobQuery(0, token_id, top_n),))
    step = StepSampler(sampling_kernel(logits.size), SamplingRows(1, logits.size, 1), step_rows([row]), {})
    step.read(0, logits[None])
    if (error := step.error(0)) is not None:
        raise raised(error)
    return step.queried(0)[0]


class KernelSampler:
    """A row whose tokens are sampled one at a time, and are taken back unless they are accepted."""

    def __init__(self, opened: OpenedRow, vocab_size: int) -> None:
        self._rows = SamplingRows(opened.row + 1, vocab_size, CONTEXT)
        self._rows.open(opened)
        self._row, self._kernel = opened.row, sampling_kernel(vocab_size)
        self._last: tuple[int, int, NDArray[np.float32], NDArray[np.uint32] | None] | None = None

    @property
    def mirostat_mu(self) -> float:
        return float(self._state.view(np.float64)[ROW["mu"]])

    @property
    def num_output_tokens(self) -> int:
        return int(self._state[ROW["outputs"]])

    def sample(
        self, logits: NDArray[np.float32], position: int, mask: NDArray[np.uint32] | None = None
    ) -> SampledToken:
        """Choose, and leave the state as it was."""
        arrays = [self._state, *self._rows._held[self._row]]
        before = [array.copy() for array in arrays]
        step = self._run(logits, position, mask)
        for array, values in zip(arrays, before, strict=True):
            array[:] = values
        if (error := step.error(0)) is not None:
            raise raised(error)
        token_id = int(step.sampled[0, 0])
        self._last = token_id, position, logits, mask
        return SampledToken(token_id, next(iter(step.logprobs(0)), None))

    def accept(self, token_id: int) -> None:
        """Take in a token: the one sampled last, else one that a mask forces."""
        last, self._last = self._last, None
        if last is not None and last[0] == token_id:
            self._run(last[2], last[1], last[3])
            return
        size = self._kernel.vocab_size
        words = np.zeros(-(-size // 32), np.uint32)
        words[token_id // 32] = 1 << (token_id % 32)
        greedy, logprobs = self._state[[ROW["greedy"], ROW["logprobs"]]]
        self._state[[ROW["greedy"], ROW["logprobs"]]] = 1, -1
        step = self._run(np.zeros(size, np.float32), 0, words)
        assert step.sampled[0, 0] == token_id
        self._state[[ROW["greedy"], ROW["logprobs"]]] = greedy, logprobs

    def adjusted(self, logits: NDArray[np.float32], mask: NDArray[np.uint32] | None = None) -> NDArray[np.float32]:
        """The logits after mask, bias, penalties and DRY."""
        padded = (logits.size // BLOCK + 1) * BLOCK
        found = self._kernel._scratch[16 * padded : 16 * padded + 4 * logits.size].view(np.float32)
        found[:] = logits  # for a row that adjusts nothing
        arrays = [self._state, *self._rows._held[self._row]]
        before = [array.copy() for array in arrays]
        self._state[ROW["greedy"]] = 1
        self._run(logits, 0, mask)
        for array, values in zip(arrays, before, strict=True):
            array[:] = values
        return found.copy()

    @property
    def _state(self) -> NDArray[np.int64]:
        return self._rows.table[self._row]

    def _run(self, logits: NDArray[np.float32], position: int, mask: NDArray[np.uint32] | None) -> StepSampler:
        columns = step_rows([scheduled_row(self._row, (0,), position - 1, True)])
        step = StepSampler(self._kernel, self._rows, columns, {} if mask is None else {self._row: mask})
        step.read(0, np.ascontiguousarray(logits)[None])
        return step
