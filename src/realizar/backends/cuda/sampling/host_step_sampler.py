"""`HostStepSampler`: the `StepSampler` of a device without the CUDA kernels: logits are copied to the host. torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.sampling.step_sampler import PoolRows
from realizar.backends.cuda.step import CUDAStep
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.host_sampler import HostSampler
from realizar.backends.row_faults import finite_vector
from realizar.batch import OpenedRow, StepOutput
from realizar.errors import RealizarError
from realizar.outputs import RowError


@dataclass(frozen=True, slots=True)
class FinishedStep:
    output: StepOutput
    made: torch.Tensor

    def read(self, _step: CUDAStep) -> StepOutput:
        return self.output


class HostStepSampler:
    """A `StepSampler` on any device. A step is sampled when it is finished, for which the host waits."""

    def __init__(self, workspace: Workspace, sampler: HostSampler) -> None:
        self._space, self._sampler = workspace, sampler

    def capture(self) -> None:
        """No graph reaches to the host."""

    def release(self) -> None:
        self._sampler.shutdown()

    def open(self, opened: OpenedRow) -> None:
        self._sampler.open(opened)

    def close(self, row: int) -> None:
        self._sampler.close(row)

    def awaits_masks(self, numbers: NDArray[np.intp]) -> bool:
        return self._sampler.follow_grammars(numbers)

    def finish(self, step: CUDAStep, parts: Iterable[range], pool: PoolRows) -> FinishedStep:
        columns, wanted = step.forward_input.columns, step.wanted
        if wanted.num_drafts:  # the device may have them alone
            ids = self._space.arrays["ids"][: len(columns.token_ids)].cpu().numpy()
            columns = replace(columns, token_ids=ids)
        kept: NDArray[np.bool_] | None = None
        if step.deferred:
            kept = np.ones(len(wanted.tokens), np.bool_)
            kept[: wanted.num_sampled] = ~step.are_deferred(columns.numbers[wanted.rows[: wanted.num_sampled]])
            columns = columns.without_sampling(step.deferred)
        sampler, first = self._sampler.begin(columns, step.masks), 0
        for part in parts:
            logits = self._space.logits[: len(part)].cpu().numpy()
            if kept is not None:
                logits = logits[kept[part.start : part.stop]]
            if len(logits):
                sampler.read(first, logits)
            first += len(logits)
        numbers, sampled = sampler.last_sampled()
        last = self._space.last
        last[torch.tensor(numbers, device=last.device)] = torch.tensor(sampled, device=last.device)
        vectors = pool(step)
        if vectors and last.is_cuda:
            torch.cuda.current_stream(last.device).synchronize()
        output = sampler.output(lambda index: _finite(vectors.get(index)))
        made = torch.tensor(output.sampled[wanted.sampled_rows], device=last.device)
        return FinishedStep(output, made)


def _finite(vector: torch.Tensor | RowError | None) -> NDArray[np.float32] | RowError | None:
    if not isinstance(vector, torch.Tensor):
        return vector
    try:
        return finite_vector(vector.numpy())
    except RealizarError as error:
        return RowError.of(error, "pooling")
