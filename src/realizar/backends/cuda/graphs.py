"""Whole steps of decodes as device graphs, one per padded number of rows: captured once, replayed with one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from realizar.backends.cuda.device import DeviceLostError, DeviceProfile, translate
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.workspace import Workspace

_LOG = logging.getLogger(__name__)


class GraphRunner:
    """Owns the graphs of a loaded model.

    A graph holds body and tail for n rows of one token each, all of which may be chosen for: it reads positions,
    lengths, block tables and the last choices on the device, so that replaying it needs only the step's arrays.
    """

    def __init__(
        self, body: Sequence[Launch], tail: Sequence[Launch], workspace: Workspace, device: DeviceProfile
    ) -> None:
        self._body, self._tail, self._space, self._device = body, tail, workspace, device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: object | None = None

    def run_eagerly(self, body: StepShape, selected: int) -> None:
        """All launches one by one; `selected` rows of logits, padded, or 0."""
        for launch, shape in self.launches(body, selected):
            launch.run(shape)

    def launches(self, body: StepShape, selected: int) -> list[tuple[Launch, StepShape]]:
        """What `run_eagerly` starts, in order."""
        of_body = [(launch, body) for launch in self._body] if body.tokens else []
        of_tail = [(launch, StepShape(selected, 0, 0)) for launch in self._tail] if selected else []
        return of_body + of_tail

    def replay(self, rows: int) -> bool:
        """Run a step of so many rows, padded, from its graph; False where there is none."""
        graph = self._graphs.get(rows)
        if graph is None:
            return False
        graph.replay()
        return True

    def capture(self, row_counts: Sequence[int], progress: Callable[[float], None]) -> None:
        """Compile and warm every size, then capture it. A size that fails runs eagerly, and is logged once.

        Raises:
            DeviceLostError: the device failed, not the capture.
        """
        if not self._device.is_gpu:
            return
        self._space.arrays.clear()
        for done, rows in enumerate(sorted(row_counts, reverse=True)):  # the largest first: others reuse its memory
            shape = StepShape(rows, rows, 0)
            self.run_eagerly(shape, rows)
            torch.cuda.synchronize(self._device.torch_device)
            try:
                self._graphs[rows] = self._capture(shape)
            except Exception as error:
                ours = translate(error)
                if isinstance(ours, DeviceLostError):
                    raise ours from error
                _LOG.warning("steps of %d rows run without a graph: capture failed: %s", rows, error)
            progress((done + 1) / len(row_counts))

    def close(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        self._pool = None

    def _capture(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self.run_eagerly(shape, shape.tokens)
        self._pool = graph.pool()
        return graph
