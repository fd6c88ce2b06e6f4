"""Steps as device graphs, one per padded shape: captured once at load, replayed with one call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from realizar.backends.cuda.capture import GraphRecorder, failure_of
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.shapes import least_holding, padded_rows
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.workspace import Workspace

_LOG = logging.getLogger(__name__)
_NOTHING = StepShape(0, 0, 0)


class GraphRunner:
    """Owns the graphs of a loaded model.

    A graph of decodes holds body and tail for n rows of one token each, all of which may be chosen for. A graph of a
    step with chunks holds the body alone: how many rows are chosen for varies, and the host starts the tail's few
    launches while the body runs. Both read positions, lengths, block tables, tiles and the last choices on the device,
    so that replaying one needs only the step's arrays.
    """

    def __init__(
        self, body: Sequence[Launch], tail: Sequence[Launch], workspace: Workspace, device: DeviceProfile
    ) -> None:
        self._body, self._tail, self._space, self._device = body, tail, workspace, device
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._recorder: GraphRecorder | None = None

    def padded(self, chunks: StepShape) -> StepShape:
        """The shape that a step with chunks runs in: that of the smallest graph which holds it, or its own.

        Args:
            chunks: its tokens and decodes padded as they are without a graph.
        """
        return least_holding(chunks, self._graphs) or chunks

    def run(self, shape: StepShape, selected: int) -> None:
        """Run a step and the logits of `selected` tokens, by the shape's graph if it has one, else launch by launch."""
        rows = padded_rows(selected, self._space.arrays.sizes.selected)
        if shape.tiles and self.replay(shape):
            self.run_eagerly(_NOTHING, rows)
        elif shape.tiles or not 0 < selected <= shape.tokens or not self.replay(shape):
            self.run_eagerly(shape, rows)

    def run_eagerly(self, body: StepShape, selected: int) -> None:
        """Start all launches one by one; the logits of `selected` tokens, padded, or of none."""
        for launch, shape in self.launches(body, selected):
            launch.run(shape)

    def launches(self, body: StepShape, selected: int) -> list[tuple[Launch, StepShape]]:
        """The launches of `run_eagerly`, in order, each with its shape."""
        of_body = [(launch, body) for launch in self._body] if body.tokens else []
        of_tail = [(launch, StepShape(selected, 0, 0)) for launch in self._tail] if selected else []
        return of_body + of_tail

    def replay(self, shape: StepShape) -> bool:
        """Start the graph of a shape; False where there is none."""
        graph = self._graphs.get(shape)
        if graph is None:
            return False
        graph.replay()
        return True

    def prepare(self, shapes: Sequence[StepShape], progress: Callable[[float], None], *, capture: bool = True) -> None:
        """Compile and warm every shape, then capture it; a warning names those that can't be captured and run eagerly.

        Decodes come first, as they have most to lose where memory does not suffice, and of each kind the largest:
        others reuse its memory.

        Args:
            capture: False leaves all to run eagerly.

        Raises:
            DeviceLostError: the device failed, not the capture.
        """
        if not self._device.is_gpu:
            return
        self._space.arrays.clear()
        ordered = sorted(shapes, key=lambda shape: (shape.tiles > 0, -shape.tokens, -shape.decodes))
        failed: dict[StepShape, str] = {}
        for done, shape in enumerate(ordered):
            self.run_eagerly(shape, _captured_tail(shape))
            torch.cuda.synchronize(self._device.torch_device)
            reason = self._try_capture(shape) if capture else None
            if reason is not None:
                failed[shape] = reason
            progress((done + 1) / len(ordered))
        for shape, reason in failed.items():
            _LOG.debug("%s have no graph: %s", _described(shape), reason)
        if failed:
            _LOG.warning("%s run without a graph: %s", "; ".join(map(_described, failed)), next(iter(failed.values())))
        _LOG.info("%d of %d shapes of steps have a graph", len(self._graphs), len(ordered))

    def close(self) -> None:
        """Free the graphs."""
        self._graphs.clear()
        self._recorder = None

    def _try_capture(self, shape: StepShape) -> str | None:
        """Capture a shape's graph; None, or why there is none."""
        try:
            self._graphs[shape] = self._capture(shape)
        except Exception as error:  # noqa: BLE001 - raised again where the device failed
            return failure_of(error)
        return None

    def _capture(self, shape: StepShape) -> torch.cuda.CUDAGraph:
        if self._recorder is None:
            self._recorder = GraphRecorder(self._device.torch_device)
        return self._recorder.record(lambda: self.run_eagerly(shape, _captured_tail(shape)))


def _captured_tail(shape: StepShape) -> int:
    """Selected tokens in a shape's graph."""
    return 0 if shape.tiles else shape.tokens


def _described(shape: StepShape) -> str:
    if not shape.tiles:
        return f"steps of {shape.tokens} decodes"
    return f"steps of {shape.tokens} tokens in chunks and {shape.decodes} decodes"
