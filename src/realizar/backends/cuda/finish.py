"""The end of a step: choices, log-probabilities and pooled vectors, made on the device, copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from realizar.backends.cuda.device_errors import row_error
from realizar.backends.cuda.graphs import GraphRunner
from realizar.backends.cuda.host_copies import HostCopies
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.sampling.step_sampler import RowLogprobs, StepSampler
from realizar.backends.cuda.shapes import padded_rows, row_counts
from realizar.backends.cuda.step import CUDAStep, PendingResult
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.workspace import Workspace
from realizar.batch import ScheduledRow
from realizar.outputs import RowError
from realizar.request import Pooling

_RESULT_BYTES = 384  # of a token: its choice, and its log-probability with a list of 20 ids


class StepFinisher:
    """Finishes the step that ran last.

    Args:
        pool: launches that write final hidden states of the selected tokens to `Workspace.pooled`.
    """

    def __init__(self, workspace: Workspace, graphs: GraphRunner, pool: Sequence[Launch], sampler: StepSampler) -> None:
        self._space, self._graphs, self._pool, self._sampler = workspace, graphs, pool, sampler
        self._means: dict[int, tuple[torch.Tensor, int]] = {}
        self._free: list[HostCopies] = []

    def close(self, row: int) -> None:
        """Forget a row's mean."""
        self._means.pop(row, None)

    def finish(self, step: CUDAStep) -> PendingResult:
        """Start everything that the step's rows want: choices, log-probabilities, means. Copies are not awaited."""
        most, wanted = self._space.arrays.sizes.selected, step.wanted
        chosen = self._sampler.make(step)
        errors = dict(self._sampler.errors)
        copies = self._free.pop() if self._free else self._new_copies()
        copies.begin()
        result = copies.copy(chosen)  # before anything else is chosen among
        logprobs: list[RowLogprobs] = []
        for first in range(0, len(wanted.tokens), most):
            part = range(first, min(first + most, len(wanted.tokens)))
            if first:
                self.logits(wanted.tokens[first : part.stop])
            logprobs += self._sampler.start_logprobs(step, part, copies.copy)
        pooled = self._pool_rows(step, errors)
        copies.done()
        return PendingResult(result, logprobs, pooled, errors, copies.wait, partial(self._free.append, copies))

    def _new_copies(self) -> HostCopies:
        """Room for the results of a step: as many steps have one as are in flight."""
        return HostCopies(self._space.arrays.sizes.selected * _RESULT_BYTES, self._space.logits.device)

    def warm(self) -> None:
        """Compile what pooled rows start, for every number of them."""
        for rows in row_counts(self._space.arrays.sizes.selected):
            for launch in self._pool:
                launch.run(StepShape(rows, 0, 0))

    def capture(self) -> None:
        """Capture the sampler's graphs, while the step's arrays name no row."""
        self._sampler.capture()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] of some of the last step's tokens, at most `sizes.selected`; its choices are lost."""
        self._select(tokens)
        self._graphs.run_eagerly(StepShape(0, 0, 0), padded_rows(len(tokens), self._space.arrays.sizes.selected))
        return self._space.logits[: len(tokens)]

    def _select(self, tokens: Sequence[int]) -> None:
        arrays = self._space.arrays
        selected = arrays["selected"][: len(tokens)]
        # from pinned memory, or the host would wait for the step that is on its way
        selected.copy_(torch.tensor(tokens, dtype=torch.int32, pin_memory=selected.is_cuda), non_blocking=True)
        arrays["selected_rows"].fill_(-1)

    def _pool_rows(self, step: CUDAStep, errors: dict[int, RowError]) -> dict[int, torch.Tensor]:
        """The pooled vectors on their way to the host, by their row's index; what one raises joins `errors`."""
        pooled = {}
        columns = step.forward_input.columns
        for index, pooling in columns.pooling.items():
            row = columns.row(index)
            if not row.num_tokens:
                continue
            try:
                vector = self._pooled(row, pooling, int(columns.starts[index]))
            except Exception as error:  # noqa: BLE001 - nor are its numbers
                errors[index] = row_error(error, "pooling")
            else:
                pooled[index] = vector.to("cpu", non_blocking=True)
        return pooled

    def _pooled(self, row: ScheduledRow, pooling: Pooling, start: int) -> torch.Tensor:
        """The pooled hidden state that a row wants, float32 [hidden_size]; its first token is at `start`."""
        end = start + row.num_tokens
        if pooling == "last":
            return self._hidden(range(end - 1, end))[0].clone()
        total, count = self._means.get(row.row, (None, 0)) if row.num_computed_tokens else (None, 0)
        if count != row.num_computed_tokens:
            raise RuntimeError(f"a mean over {row.num_computed_tokens} earlier tokens is wanted, and {count} were seen")
        most = self._space.arrays.sizes.selected
        for first in range(start, end, most):
            part = self._hidden(range(first, min(first + most, end))).sum(dim=0, dtype=torch.float64)
            total = part if total is None else total + part
        assert total is not None
        count += row.num_tokens
        self._means[row.row] = total, count
        return (total / count).float()

    def _hidden(self, tokens: range) -> torch.Tensor:
        """Final hidden states float32 [tokens, hidden_size], until the next use of `pooled`."""
        self._select(tokens)
        shape = StepShape(padded_rows(len(tokens), self._space.arrays.sizes.selected), 0, 0)
        for launch in self._pool:
            launch.run(shape)
        return self._space.pooled[: len(tokens)]
