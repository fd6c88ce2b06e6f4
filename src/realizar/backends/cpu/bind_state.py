"""Mixers with a state bound to kernels: what reads the outputs of their input matmuls and the states of rows."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.short_convolution import SHORT_CONVOLUTION
from realizar.backends.cpu.operations import BoundOperation
from realizar.backends.cpu.records import address
from realizar.backends.cpu.state.memory import StateMemory
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.weights.pack import PackedMatrix
from realizar.backends.cpu.workspace import Workspace, written_records
from realizar.models.mixers import ShortConvolution


@dataclass(frozen=True, slots=True)
class StateBinder:
    """Binds mixers with a state, from the buffer `state inputs` to `attended`."""

    kernels: KernelLibrary
    weights: Weights
    workspace: Workspace
    states: StateMemory

    def short_convolution(self, mixer: ShortConvolution, layer: int) -> BoundOperation:
        """b, c and x of `state inputs` to c * convolution(b * x)."""
        read, written = self.workspace.buffers["state inputs"], self.workspace.buffers["attended"]
        quantised = isinstance(self.weights.matrices[mixer.out_proj.weight], PackedMatrix)
        record = SHORT_CONVOLUTION.pack({
            "step": address(self.workspace.step), "input": read.at, "input_stride": read.stride,
            "channels": mixer.channels, "length": mixer.length, "taps": address(self.weights.taps(mixer.kernel)),
            "bias": 0 if mixer.bias is None else address(self.weights.vector(mixer.bias)),
            **self._state_fields(layer), "out": written.at, "out_stride": written.stride,
            **written_records(written.records if quantised else None),
        })  # fmt: skip
        return BoundOperation("convolution", self.kernels.short_convolution, record)

    def _state_fields(self, layer: int) -> dict[str, int | float]:
        """The fields by which a kernel finds the rows of a step and their states."""
        states = self.states
        return {
            "rows": address(states.rows), "states": states.state_address(layer), "slot_bytes": states.sizes.slot_bytes,
            "replays": states.replay_address(layer), "replay_bytes": states.sizes.replay_bytes,
            "token_bytes": 4 * states.sizes.layers[layer].replay,
        }  # fmt: skip
