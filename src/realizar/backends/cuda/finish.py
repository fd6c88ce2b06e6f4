"""The end of a step: sampled tokens, log-probabilities and pooled vectors, made on the device, copied to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from realizar.backends.cuda.device_errors import row_error
from realizar.backends.cuda.graphs import GraphRunner
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.sampling.step_sampler import StepSampler
from realizar.backends.cuda.shapes import padded_rows
from realizar.backends.cuda.step import CUDAStep, Finished
from realizar.backends.cuda.workspace import Workspace
from realizar.batch import StepRows
from realizar.outputs import RowError
from realizar.request import Pooling


class StepFinisher:
    """Finishes the step that ran last; `final_norm` writes final hidden states of selected tokens to `final_states`.

    Attributes:
        selected: tokens of the step that were selected last; a load that gives states has these in `final_states`.
    """

    def __init__(
        self, workspace: Workspace, graphs: GraphRunner, final_norm: Sequence[Launch], sampler: StepSampler
    ) -> None:
        self._space, self._graphs, self._final_norm, self._sampler = workspace, graphs, final_norm, sampler
        self._means: dict[int, tuple[torch.Tensor, int]] = {}
        self.selected: Sequence[int] = ()

    def close(self, row: int) -> None:
        self._means.pop(row, None)

    def finish(self, step: CUDAStep) -> Finished:
        """Start everything that the step's rows want: sampled tokens, log-probabilities, means."""
        return self._sampler.finish(step, self._parts(step.wanted.tokens), self._pool_rows)

    def _parts(self, tokens: Sequence[int]) -> Iterator[range]:
        """Ranges of the wanted tokens whose logits are computed at once; a step has computed the first ones."""
        most = self._space.arrays.sizes.selected
        for first in range(0, len(tokens), most):
            part = range(first, min(first + most, len(tokens)))
            if first:
                self.logits(tokens[first : part.stop])
            yield part

    def warm(self, counts: Iterable[int]) -> None:
        """Compile what final hidden states start, for padded numbers of them."""
        for rows in counts:
            for launch in self._final_norm:
                launch.run(StepKind(rows))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] of some of the last step's tokens, at most `sizes.selected`; its samples are lost."""
        self._select(tokens)
        self._graphs.run_eagerly(StepKind(0), padded_rows(len(tokens), self._space.arrays.sizes.selected))
        return self._space.logits[: len(tokens)]

    def _select(self, tokens: Sequence[int]) -> None:
        arrays = self._space.arrays
        selected = arrays["selected"][: len(tokens)]
        # from pinned memory, or the host would wait for the step that is on its way
        selected.copy_(torch.tensor(tokens, dtype=torch.int32, pin_memory=selected.is_cuda), non_blocking=True)
        arrays["selected_rows"].fill_(-1)
        self.selected = tokens

    def _pool_rows(self, step: CUDAStep) -> dict[int, torch.Tensor | RowError]:
        """The pooled vectors on their way to the host, by their row's index, or what computing one raised."""
        pooled: dict[int, torch.Tensor | RowError] = {}
        columns = step.forward_input.columns
        for index, pooling in columns.pooling.items():
            if not columns.num_tokens[index]:
                continue
            try:
                vector = self._pooled(columns, index, pooling)
            except Exception as error:  # noqa: BLE001 - one row's numbers are not the others' trouble
                pooled[index] = row_error(error, "pooling")
            else:
                pooled[index] = vector.to("cpu", non_blocking=True)
        return pooled

    def _pooled(self, columns: StepRows, index: int, pooling: Pooling) -> torch.Tensor:
        """The pooled hidden state that a row wants, float32 [hidden_size]."""
        start, end = columns.starts[index : index + 2].tolist()
        if pooling == "last":
            (state,) = self.final_states([end - 1])
            return state[0].clone()
        row, computed = int(columns.numbers[index]), int(columns.num_computed_tokens[index])
        total, count = self._means.get(row, (None, 0)) if computed else (None, 0)
        if count != computed:
            raise RuntimeError(f"a mean over {computed} earlier tokens is wanted, and {count} were seen")
        for states in self.final_states(range(start, end)):
            part = states.sum(dim=0, dtype=torch.float64)
            total = part if total is None else total + part
        assert total is not None
        count += end - start
        self._means[row] = total, count
        return (total / count).float()

    def final_states(self, tokens: Sequence[int]) -> Iterator[torch.Tensor]:
        """Of some tokens of the last step after the final norm, in parts float32 [some, hidden_size], soon
        overwritten.
        """
        most = self._space.arrays.sizes.selected
        for first in range(0, len(tokens), most):
            part = tokens[first : first + most]
            self._select(part)
            kind = StepKind(padded_rows(len(part), most))
            for launch in self._final_norm:
                launch.run(kind)
            yield self._space.final_states[: len(part)]
