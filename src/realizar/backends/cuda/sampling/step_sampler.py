"""`StepSampler`: what a step asks of a sampler, be it kernels or torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.sampling.logprobs import PendingLogprobs
from realizar.backends.cuda.step import CUDAStep
from realizar.batch import OpenedRow
from realizar.outputs import RowError

RowLogprobs: TypeAlias = tuple[Sequence[int] | NDArray[np.integer[Any]], PendingLogprobs]
"""Log-probabilities of some wanted tokens of a step, and their indices there."""

CopyToHost: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Starts a copy to the host and returns where it will be; see `HostCopies`."""


class StepSampler(Protocol):
    """The parameters and states of all rows, and the choices of a step.

    Attributes:
        errors: of rows whose choices failed on the host in the step made last, by their index in the step.
    """

    errors: dict[int, RowError]

    def capture(self) -> None:
        """Capture what graphs there are, while the step's arrays name no row.

        Raises:
            DeviceLostError: the device failed.
        """

    def free_graphs(self) -> None:
        """Free the graphs, whose memory is not that of tensors."""

    def open(self, opened: OpenedRow) -> None:
        """Start a row.

        Raises:
            InvalidRequestError: `logit_bias` names an id beyond the vocabulary.
        """

    def close(self, row: int) -> None:
        """Forget a row, also one that could not be opened."""

    def awaits_masks(self, numbers: NDArray[np.intp]) -> bool:
        """True if any of these rows, intp [rows], follows a grammar, whose masks come after the step has started."""

    def take_in(
        self, numbers: NDArray[np.intp], choices: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Take in the choices of rows with drafts once the host has read them.

        Args:
            numbers: intp [rows]. choices: int32 [rows, 1 + drafts], below 0 from where none stands on.

        Returns:
            How many each row keeps up to one that ends its output, intp [rows], and true where there is one,
            bool [rows]. A grammar may end it before `min_tokens`.
        """

    def make(self, step: CUDAStep) -> torch.Tensor:
        """Make the choices of the step that ran last, and take them into its rows' state.

        Largest logits are found already: what `Workspace.choices` holds stands where nothing else is wanted.

        Returns:
            int32 [rows that choose, 1 + drafts], NOT_REACHED after a draft that was not chosen; below 0 is an error.
        """

    def start_logprobs(self, step: CUDAStep, part: range, copy: CopyToHost) -> list[RowLogprobs]:
        """Start log-probabilities of the wanted tokens in `part`, whose logits and choices are there now.

        Args:
            copy: starts a copy to the host.
        """
