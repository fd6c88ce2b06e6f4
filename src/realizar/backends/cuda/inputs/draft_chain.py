"""`DraftChain`: from one draft to the next on the device, which knows what was sampled before the host does."""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import CarriedPlaces
from realizar.backends.cuda.capture import GraphRecorder, failure_of
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernels.go_on import (
    CHAIN_HEADER,
    CHAIN_LINES,
    gather_states,
    go_on,
    keep_states,
    take_states,
)
from realizar.backends.cuda.workspace import Workspace
from realizar.models.parts import AssistantInputs, NextTokenInputs, PairedInputs
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)
_COLUMNS = 1024  # of a state, that a program copies


class DraftChain:
    """Keeps what the rows of a drafter's step sampled, and makes its arrays those of the step that follows.

    All that it launches is the same for every step, and one graph: numbers, and how far rows go, lie on the device.

    Args:
        drafts: int32 [places, rows of the model], where drafts are kept; an id from `num_ids` on as the last one.
    """

    def __init__(
        self, spec: ModelSpec, space: Workspace, device: DeviceProfile, block_size: int, drafts: torch.Tensor,
        num_ids: int,
    ) -> None:  # fmt: skip
        self._space, self._drafts, self._largest, self._block_size = space, drafts, num_ids - 1, block_size
        self._device, self._rows = device, space.arrays.sizes.rows
        self._moves = not isinstance(spec.next_token, AssistantInputs)
        self._is_kept, self._reads_states = spec.fusion is not None, spec.next_token is not None
        self._keeps = isinstance(spec.next_token, NextTokenInputs | PairedInputs)
        self._lines = torch.zeros(
            CHAIN_HEADER + CHAIN_LINES * self._rows, dtype=torch.int32, device=device.torch_device
        )
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(
        self, numbers: NDArray[np.intp], wanted: NDArray[np.int32], chosen: NDArray[np.intp], padded: int
    ) -> None:
        """Of each row of the step its number in the model, its drafts, and its index among the sampled tokens.

        `padded` is the number of rows that a step has with so many.
        """
        pinned = torch.empty(self._lines.shape, dtype=torch.int32, pin_memory=self._device.is_gpu)
        lines, count = pinned.numpy(), len(numbers)
        lines[:CHAIN_HEADER] = 0, count, padded, 0
        of_rows = lines[CHAIN_HEADER:].reshape(CHAIN_LINES, -1)
        of_rows[0, :count], of_rows[1, :count], of_rows[2, :count] = numbers, wanted, chosen
        self._lines.copy_(pinned, non_blocking=True)

    def carry(self, kept: torch.Tensor, own: torch.Tensor, places: CarriedPlaces) -> None:
        """Write the states of a step where the drafter reads them, and keep some, as `GivesHiddenStates.carry` says."""
        tokens, width = len(places.sources), own.shape[1]
        pinned = torch.empty(tokens + places.kept.size, dtype=torch.int32, pin_memory=self._device.is_gpu)
        np.concatenate((places.sources, places.kept.reshape(-1)), out=pinned.numpy())
        lines, blocks = pinned.to(self._device.torch_device, non_blocking=True), -(-width // _COLUMNS)
        gather_states[(tokens, blocks)](kept, own, lines, self._space.states, width, BLOCK=_COLUMNS)
        if len(own):  # behind all that reads what lay there
            keep_states[(len(own), blocks)](kept, own, lines[tokens:], width, BLOCK=_COLUMNS)

    def go_on(self) -> None:
        """Keep a draft of each row that wants it; those that want another decode it in the next step."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()

    def prepare(self, *, capture: bool) -> None:
        """Compile what it launches, of no row; captured, if asked, unless the device can't."""
        if not self._device.is_gpu:
            return
        nobody = np.zeros(0, np.intp)
        self.begin(nobody, nobody.astype(np.int32), nobody, 0)
        if self._keeps:
            for tokens in (1, 4):  # Triton compiles for addresses that are multiples of 16, and for others
                states = self._space.states[:tokens]
                places = CarriedPlaces(np.zeros(tokens, np.int32), np.full((tokens, 2), -1, np.int32))
                self.carry(states, states, places)
        self._launch()
        torch.cuda.synchronize(self._device.torch_device)
        if capture:
            try:
                self._graph = GraphRecorder(self._device.torch_device).record(self._launch)
            except Exception as error:  # noqa: BLE001 - raised again where the device failed
                _LOG.warning("drafts follow each other without a graph: %s", failure_of(error))

    def release(self) -> None:
        self._graph = None

    def _launch(self) -> None:
        space, arrays = self._space, self._space.arrays
        if self._reads_states:
            source = space.kept[0] if self._is_kept else space.final_states
            width = source.shape[1]
            take_states[(self._rows, -(-width // _COLUMNS))](
                self._lines, source, arrays["selected"], space.states, width, ROWS=self._rows, KEPT=self._is_kept,
                BLOCK=_COLUMNS,
            )  # fmt: skip
        names = ("decodes", "selected", "selected_rows", "tables")
        go_on[(1,)](
            self._lines, space.sampled, self._drafts, self._drafts.stride(0), self._largest, arrays["header"],
            arrays["ids"], arrays["token_rows"], arrays["positions"], arrays.angles, arrays.shifts, arrays["slots"],
            arrays.sizes.tokens, arrays["starts"], arrays["counts"], arrays["contexts"], arrays.lags,
            *(arrays[name] for name in names), ROWS=self._rows, MOVES=self._moves, GROUPS=arrays.sizes.groups,
            BLOCK_SIZE=self._block_size, BLOCK=1 << (self._rows - 1).bit_length(), num_warps=1,
        )  # fmt: skip
