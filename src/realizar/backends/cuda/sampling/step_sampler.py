"""`StepSampler`: what a step asks of a sampler, be it kernels or the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.sampling.logprobs import PendingLogprobs
from realizar.backends.cuda.step import CUDAStep, Finished
from realizar.batch import OpenedRow
from realizar.outputs import RowError

RowLogprobs: TypeAlias = tuple[Sequence[int] | NDArray[np.integer[Any]], PendingLogprobs]
"""Log-probabilities of some wanted tokens of a step, and their indices there."""

CopyToHost: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Starts a copy to the host and returns where it will be; see `HostCopies`."""

PoolRows: TypeAlias = Callable[[CUDAStep], Mapping[int, torch.Tensor | RowError]]
"""Starts the pooled vectors of a step's rows on their way to the host: by the row's index, or why it has none."""


class StepSampler(Protocol):
    """The parameters and states of all rows, and the sampling of a step."""

    def capture(self) -> None:
        """Capture what graphs there are, while the step's arrays name no row; DeviceLostError: the device failed."""

    def release(self) -> None:
        """Free what is not memory of tensors: graphs, and threads of the host. Idempotent."""

    def open(self, opened: OpenedRow) -> None:
        """Start a row; InvalidRequestError where `logit_bias` names an id beyond the vocabulary."""

    def close(self, row: int) -> None:
        """Forget a row, also one that could not be opened."""

    def awaits_masks(self, numbers: NDArray[np.intp]) -> bool:
        """True if any of these rows, intp [rows], follows a grammar, whose masks come after the step has started."""

    def finish(self, step: CUDAStep, parts: Iterable[range], pool: PoolRows) -> Finished:
        """Sample the step that ran last, take the tokens into its rows' state, and start all that it wants.

        Largest logits are found already: what `Workspace.sampled` holds stands where nothing else is wanted.

        Args:
            parts: ranges of the step's wanted tokens; each one's logits are in the workspace once it is given. The
                first one's are there before, and holds all sampled tokens.
            pool: called once, after the last part.
        """
