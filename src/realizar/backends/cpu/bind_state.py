"""Mixers with a state bound to kernels: what reads the outputs of their input matmuls and the states of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.recurrence import head_lanes, run_columns
from realizar.backends.cpu.instruction_set import InstructionSet
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.attention_record import STEP_TOKENS
from realizar.backends.cpu.kernels.delta_net import DELTA_NET
from realizar.backends.cpu.kernels.normalize import NO_NORM, NORMALIZE, normalize
from realizar.backends.cpu.kernels.short_convolution import SHORT_CONVOLUTION, short_convolution
from realizar.backends.cpu.operations import BoundOperation
from realizar.backends.cpu.records import address
from realizar.backends.cpu.state.memory import StateMemory
from realizar.backends.cpu.state.sizes import convolution_floats, input_columns
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.workspace import Workspace, written_records
from realizar.errors import UnsupportedModelError
from realizar.models.mixers import GatedDeltaNet, ShortConvolution


@dataclass(frozen=True, slots=True)
class StateBinder:
    """Binds mixers with a state, from the buffer `state inputs` to `attended`."""

    instructions: InstructionSet
    kernels: KernelLibrary
    weights: Weights
    workspace: Workspace
    states: StateMemory

    def short_convolution(self, mixer: ShortConvolution, layer: int) -> BoundOperation:
        """b, c and x of `state inputs` to c * convolution(b * x)."""
        written = self.workspace.buffers["attended"]
        record = self.workspace.record(
            SHORT_CONVOLUTION, **self.workspace.buffers["state inputs"].fields("input"), channels=mixer.channels,
            length=mixer.length, taps=address(self.weights.taps(mixer.kernel)),
            bias=self.weights.vector_at(mixer.bias), **self._state_fields(layer), **written.fields("out"),
            **written_records(written.records if self.weights.is_packed(mixer.out_proj) else None),
        )  # fmt: skip
        return BoundOperation("convolution", short_convolution, record)

    def gated_delta_net(self, mixer: GatedDeltaNet, layer: int) -> Iterator[BoundOperation]:
        """q, k, v, z, beta and decay of `state inputs` to the gated heads."""
        quantised = self.weights.is_packed(mixer.out)
        self._check_delta_net(mixer, layer, quantised)
        by_head = quantised and mixer.value_size % GROUP == 0
        record, lanes = self._delta_net_record(mixer, layer, by_head), self._head_lanes(mixer)
        yield BoundOperation("convolution", self.kernels.mix(lanes), record)
        recur = self.kernels.recur(lanes, run_columns(mixer.value_size, lanes))
        yield BoundOperation("recurrence", recur, record)
        if quantised and not by_head:
            yield BoundOperation("recurrence", normalize, self._quantise_record(mixer))

    def _head_lanes(self, mixer: GatedDeltaNet) -> int:
        return head_lanes((mixer.key_size, mixer.value_size), self.instructions.lanes)

    def _delta_net_record(self, mixer: GatedDeltaNet, layer: int, by_head: bool) -> NDArray[np.int64]:
        """The record of both kernels, which quantise each head where they are whole groups, as `by_head` says."""
        read, mixed, written = (self.workspace.buffers[name] for name in ("state inputs", "convolved", "attended"))
        columns, fields, scratch = input_columns(mixer), self._state_fields(layer), self.workspace.delta_scratch
        return self.workspace.record(
            DELTA_NET, **read.fields("inputs"), gate_column=columns[3], beta_column=columns[4], decay_column=columns[5],
            key_heads=mixer.num_key_heads, value_heads=mixer.num_value_heads, key_size=mixer.key_size,
            value_size=mixer.value_size, length=mixer.length, tiled=mixer.tiled,
            taps=address(self.weights.taps(mixer.kernel)), decay_bias=self.weights.vector_at(mixer.decay_bias),
            rate=address(self.weights.rates(mixer.rate, is_log=mixer.rate_is_log)), **fields,
            matrices=fields["states"] + 4 * convolution_floats(mixer), **mixed.fields("mixed"),
            zeros=address(self.workspace.zeros), weight=self.weights.norm_at(mixer.norm), eps=float(mixer.norm.eps),
            scratch=address(scratch), scratch_bytes=int(scratch.strides[0]), **written.fields("out"),
            **written_records(written.records if by_head else None),
        )  # fmt: skip

    def _quantise_record(self, mixer: GatedDeltaNet) -> NDArray[np.int64]:
        written, unused = self.workspace.buffers["attended"], dict.fromkeys(NORMALIZE.names, 0)
        return NORMALIZE.pack({
            **unused, "step": address(self.workspace.step), "count_field": STEP_TOKENS, **written.fields("input"),
            "width": mixer.num_value_heads * mixer.value_size, "kind": NO_NORM, **written.fields("out"),
            **written_records(written.records),
        })  # fmt: skip

    def _check_delta_net(self, mixer: GatedDeltaNet, layer: int, quantised: bool) -> None:
        """Refuse heads that are no whole vectors, outputs that are no whole groups, and norms other than RMSNorm."""
        keys, values = mixer.num_key_heads * mixer.key_size, mixer.num_value_heads * mixer.value_size
        whole = GROUP if quantised else 4
        if not self._head_lanes(mixer) or keys % self.instructions.lanes or values % whole:
            raise UnsupportedModelError(
                f"layer {layer}: a gated delta net with {mixer.num_key_heads} key heads of {mixer.key_size} and "
                f"{mixer.num_value_heads} value heads of {mixer.value_size}: the CPU backend takes heads of multiples "
                f"of 4, the former together of {self.instructions.lanes}, the latter of {whole}"
            )
        if mixer.norm.kind != "rms" or mixer.norm.bias is not None:
            raise UnsupportedModelError(f"layer {layer}: a gated delta net whose heads have another norm than RMSNorm")

    def _state_fields(self, layer: int) -> dict[str, int | float]:
        states = self.states
        return {
            "rows": address(states.rows), "states": states.state_address(layer), "slot_bytes": states.sizes.slot_bytes,
            "replays": states.replay_address(layer), "replay_bytes": states.sizes.replay_bytes,
            "token_bytes": 4 * states.sizes.layers[layer].replay,
        }  # fmt: skip
