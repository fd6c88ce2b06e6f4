"""A program's blocks bound to kernels and addresses: the table that threads walk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.bind_experts import ExpertsBinder
from realizar.backends.cpu.bind_kv import AttentionBinder
from realizar.backends.cpu.bind_ranks import RankBinder
from realizar.backends.cpu.bind_state import StateBinder
from realizar.backends.cpu.instruction_set import InstructionSet
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.activate import ACTIVATE
from realizar.backends.cpu.kernels.attention_record import STEP_SELECTED, STEP_TERMS, STEP_TOKENS
from realizar.backends.cpu.kernels.float_linear import FLOAT_LINEAR
from realizar.backends.cpu.kernels.layer_inputs import LAYER_INPUTS, layer_inputs
from realizar.backends.cpu.kernels.linear import LINEAR
from realizar.backends.cpu.kernels.normalize import (
    CLIP,
    NORMALIZE,
    REORDER,
    SELECT,
    clip,
    norm_kind,
    normalize,
    reorder,
    select,
)
from realizar.backends.cpu.operations import BoundOperation, BoundProgram
from realizar.backends.cpu.records import address
from realizar.backends.cpu.state.sizes import input_columns
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.weights.pack import FloatMatrix, PackedMatrix
from realizar.backends.cpu.workspace import (
    RowBuffer,
    Workspace,
    added_features,
    kept_stream,
    written_records,
)
from realizar.backends.machine import read_machine
from realizar.backends.parts import SHARED_PART, block_name, inputs_part, join_part
from realizar.backends.program import (
    AttentionBlock,
    Block,
    ExpertsBlock,
    FeedForwardBlock,
    GatedDeltaNetBlock,
    InputGateBlock,
    Join,
    Program,
    SharedAttentionBlock,
    ShortConvolutionBlock,
    Tail,
    ends_layer,
    layer_blocks,
)
from realizar.errors import UnsupportedModelError
from realizar.models.layer_inputs import LayerInputs
from realizar.models.parts import Activation, AssistantInputs, Fusion, Linear, NextTokenInputs, Norm, PairedInputs
from realizar.models.spec import FeedForward
from realizar.models.tensor_source import TensorName
from realizar.models.tower import Projector, Tower

_DEFAULT_L2_BYTES = 1 << 20  # where the system reports none


class Binder:
    def __init__(
        self, instructions: InstructionSet, kernels: KernelLibrary, weights: Weights, workspace: Workspace,
        attention: AttentionBinder, states: StateBinder, ranks: RankBinder | None = None,
    ) -> None:  # fmt: skip
        self.instructions, self.kernels, self.weights = instructions, kernels, weights
        self.workspace, self._attention, self._states, self._ranks = workspace, attention, states, ranks
        self._block_bytes = read_machine().cache_bytes.get("L2", _DEFAULT_L2_BYTES) // 2

    def bind_blocks(self, program: Program, deepstack: int = 0) -> BoundProgram:
        """With what is added after the first `deepstack` layers."""
        operations = list(self._add_up("hidden")) if program.sums_embedding else []
        operations += [] if program.layer_inputs is None else list(self._layer_inputs(program.layer_inputs))
        operations += [] if program.next_token is None else list(self._next_token_inputs(program.next_token))
        for index, block in enumerate(program.blocks):
            operations += [*self._kept(program, index), *self._block(block)]
            if block.layer < deepstack and ends_layer(program.blocks, index):
                source = added_features(block.layer)
                operations.append(self._normalize("features of images", None, source, "branch", add_scale=1.0))
        return BoundProgram([*operations, *self._kept(program, len(program.blocks))])

    def bind_tail(self, tail: Tail) -> BoundProgram:
        matmul = self._project(tail.head, "selected", "logits", "head", count=STEP_SELECTED)
        return BoundProgram([*self._final_norm(tail), *matmul, *(() if self._ranks is None else self._ranks.logits())])

    def bind_states(self, tail: Tail) -> BoundProgram:
        """The states of selected tokens in `selected`, or what an assistant makes of them in `handed on`."""
        operations = self._final_norm(tail)
        if tail.to_state is not None:
            part = "next-token inputs"
            operations.extend(self._project(tail.to_state, "selected", "handed on", part, count=STEP_SELECTED))
        return BoundProgram(operations)

    def bind_fusion(self, fusion: Fusion) -> BoundProgram:
        """From `streams` to `fused`, of as many tokens as are selected."""
        count, width = STEP_SELECTED, fusion.linear.in_features
        normed = self._normalize("fusion", fusion.norm, "streams", "streams", count=count, width=width)
        project = self._project(fusion.linear, "streams", "fused", "fusion", count=count)
        after = [] if fusion.output_norm is None else [("fusion", fusion.output_norm, "fused", "fused")]
        return BoundProgram([normed, *project, *(self._normalize(*each, count=count) for each in after)])

    def bind_injection(self, program: Program) -> BoundProgram:
        """The keys and values of `states` in the cache, in every layer."""
        part, attentions = "injection", [block for block in program.blocks if isinstance(block, AttentionBlock)]
        of_terms = [self._attention.two_terms(block.attention) for block in attentions]
        operations = [self._normalize(part, None, "states", "normed", terms=any(of_terms))]
        for block, terms in zip(attentions, of_terms, strict=True):
            operations += [
                *self._project(block.attention.k, "normed", "key", part, barrier=False),
                *self._project(block.attention.v, "normed", "value", part, terms=terms),
                self._attention.rotate(block.attention, block.layer, terms=terms),
            ]
        return BoundProgram(operations)

    def bind_tower(self, tower: Tower) -> tuple[BoundProgram, BoundProgram, list[BoundProgram]]:
        """From the buffer `patches` to `hidden`, which lacks the positions; from there to `normed` and streams that are
        kept; and by each projector from `squares` to `features`.

        All run over as many tokens as the step says.
        """
        first = [self._normalize("patches", None, "patches", "patches", width=tower.patches[0].in_features)]
        for place, each in enumerate(tower.patches):
            first.extend(self._project(each, "patches", "hidden", "patches", add_scale=1.0 if place else None))
        if tower.input_norm is not None:
            first.append(self._normalize("patches", tower.input_norm, "hidden", "hidden"))
        operations: list[BoundOperation] = []
        blocks, places = layer_blocks(tower.layers), {layer: place for place, (layer, _) in enumerate(tower.deepstack)}
        for index, block in enumerate(blocks):
            operations += self._block(block)
            if block.layer in places and ends_layer(blocks, index):
                kept = kept_stream(places[block.layer])
                operations.append(self._normalize("hidden state", None, "hidden", kept))
        operations.append(self._normalize("final norm", tower.final_norm, "hidden", "normed"))
        projectors = [BoundProgram(self._projector(each)) for each in tower.projectors]
        return BoundProgram(first), BoundProgram(operations), projectors

    def _projector(self, projector: Projector) -> Iterator[BoundOperation]:
        first, activation, second = projector.first, projector.activation, projector.second
        source, part, norm = "squares", "projector", projector.norm
        if projector.reduction is not None:
            yield self._normalize(part, norm, source, source, width=projector.reduction.in_features)
            yield from self._project(projector.reduction, source, "reduced", part)
            source, norm = "reduced", None
        yield self._normalize(part, norm, source, source, width=first.in_features)
        if second is None or activation is None:
            yield from self._project(first, source, "features", part)
            return
        up = self.workspace.buffers["up"]
        yield from self._project(first, source, "up", part)
        if projector.inner_norm is not None:
            yield self._normalize(part, projector.inner_norm, "up", "up")
        if isinstance(second, FeedForward):
            yield self._activate(activation, None, first.out_features, None, up.at, up.stride)
            yield self._normalize(part, None, "activated", "activated", width=first.out_features)
            yield from self._activated(second, part, 0, source="activated")
            second = second.down
        else:
            yield self._activate(activation, second, first.out_features, None, up.at, up.stride)
        yield from self._project(second, "activated", "features", part)

    def _kept(self, program: Program, num_blocks: int) -> list[BoundOperation]:
        return [
            self._normalize("hidden state", None, "hidden", kept_stream(place), begins_block=False)
            for place in program.kept_after(num_blocks)
        ]

    def _block(self, block: Block) -> Iterator[BoundOperation]:
        match block:
            case AttentionBlock():
                yield from self._attention_block(block)
            case SharedAttentionBlock():
                yield from self._shared_attention_block(block)
            case ShortConvolutionBlock():
                yield from self._short_convolution_block(block)
            case GatedDeltaNetBlock():
                yield from self._gated_delta_net_block(block)
            case InputGateBlock():
                yield from self._input_gate_block(block)
            case FeedForwardBlock():
                yield from self._feed_forward_block(block)
            case ExpertsBlock():
                yield from self._experts_block(block)
            case _:
                raise UnsupportedModelError(
                    f"layer {block.layer}: the CPU backend has no kernels for {block_name(block)}"
                )
        if block.join.output_scale is not None:
            yield self._scale(block.join.output_scale)

    def _attention_block(self, block: AttentionBlock) -> Iterator[BoundOperation]:
        attention, terms, part = block.attention, self._attention.two_terms(block.attention), inputs_part(block)
        if block.inputs.pair is None:
            yield self._normalize("norm", block.inputs.norm, "hidden", "normed", terms=terms)
        else:
            yield from self._pair(block.inputs.pair, terms=terms)
        yield from self._clamped(attention.q, "normed", "query", part, barrier=False)
        yield from self._clamped(attention.k, "normed", "key", part, barrier=False)
        if attention.gate is not None:
            yield from self._project(attention.gate, "normed", "attention gate", part, barrier=False)
        yield from self._clamped(attention.v, "normed", "value", part, terms=terms)
        if block.reduces_norms:
            assert self._ranks is not None
            yield from self._ranks.norms_of_heads(attention)
        elif attention.qk_norm_axis == "token":
            yield self._normalize("qk norm", attention.q_norm, "query", "query")
            yield self._normalize("qk norm", attention.k_norm, "key", "key")
        yield self._attention.rotate(attention, block.layer, terms=terms)
        yield from self._attention.attend(attention, block.layer)
        yield from self._join(block.join, "attended", join_part(block))

    def _shared_attention_block(self, block: SharedAttentionBlock) -> Iterator[BoundOperation]:
        attention, (query,) = block.attention, block.inputs.linears
        yield self._normalize("norm", block.inputs.norm, "hidden", "normed")
        yield from self._project(query, "normed", "query", inputs_part(block))
        yield self._attention.rotate_queries(attention)
        yield from self._attention.attend(attention, attention.source)
        yield from self._join(block.join, "attended", join_part(block))

    def _short_convolution_block(self, block: ShortConvolutionBlock) -> Iterator[BoundOperation]:
        yield self._normalize("norm", block.inputs.norm, "hidden", "normed")
        yield from self._project(block.convolution.in_proj, "normed", "state inputs", inputs_part(block))
        yield self._states.short_convolution(block.convolution, block.layer)
        yield from self._join(block.join, "attended", join_part(block))

    def _gated_delta_net_block(self, block: GatedDeltaNetBlock) -> Iterator[BoundOperation]:
        mixer, part = block.recurrence, inputs_part(block)
        yield self._normalize("norm", block.inputs.norm, "hidden", "normed")
        for linear, column in zip(mixer.inputs(), input_columns(mixer), strict=False):
            is_last = linear is mixer.decay
            yield from self._project(linear, "normed", "state inputs", part, barrier=is_last, column=column)
        yield from self._states.gated_delta_net(mixer, block.layer)
        yield from self._join(block.join, "attended", join_part(block))

    def _layer_inputs(self, inputs: LayerInputs) -> Iterator[BoundOperation]:
        if inputs.size % GROUP:
            raise UnsupportedModelError(f"layers have inputs of {inputs.size}: the CPU backend takes multiples of 32")
        values, rows = self.workspace.buffers["layer inputs"], self.workspace.buffers["layer rows"]
        yield self._normalize("layer inputs", None, "hidden", "normed", begins_block=False)
        yield from self._project(inputs.projection, "normed", "layer inputs", "layer inputs")
        record = self.workspace.record(
            LAYER_INPUTS, inputs=values.at, rows=rows.at, stride=values.stride,
            layers=inputs.projection.out_features // inputs.size, size=inputs.size, kind=norm_kind(inputs.norm),
            eps=float(inputs.norm.eps), weight=self.weights.norm_at(inputs.norm), scale=float(inputs.scale),
        )  # fmt: skip
        yield BoundOperation("layer inputs", layer_inputs, record)

    def _next_token_inputs(self, inputs: NextTokenInputs | AssistantInputs) -> Iterator[BoundOperation]:
        part, width = "next-token inputs", inputs.of_state.in_features
        source, token_norm, state_norm = "embedded", None, None
        if isinstance(inputs, NextTokenInputs):
            source, token_norm, state_norm = "hidden", inputs.token_norm, inputs.state_norm
        yield self._normalize(part, token_norm, source, "normed", begins_block=False, width=width)
        yield from self._project(inputs.of_token, "normed", "hidden", part)
        yield self._normalize(part, state_norm, "states", "normed", begins_block=False, width=width)
        yield from self._project(inputs.of_state, "normed", "hidden", part, add_scale=1.0)

    def _pair(self, pair: PairedInputs, *, terms: bool) -> Iterator[BoundOperation]:
        """The embedding, which is in the stream, and the state side by side in `normed`; the stream is the state's."""
        size, part = self.weights.hidden_size, "paired inputs"
        if size % GROUP:
            raise UnsupportedModelError(f"a drafter reads pairs of {size}: the CPU backend takes multiples of {GROUP}")
        yield self._normalize(part, pair.token_norm, "hidden", "normed", terms=terms, begins_block=False)
        yield self._normalize(part, pair.state_norm, "states", "normed", terms=terms, column=size, begins_block=False)
        begins_with = pair.state_norm if pair.normed_stream else None
        yield self._normalize(part, begins_with, "states", "hidden", begins_block=False)

    def _input_gate_block(self, block: InputGateBlock) -> Iterator[BoundOperation]:
        gate, values, gated = block.gate, self.workspace.buffers["layer inputs"], self.workspace.buffers["layer rows"]
        size = gate.gate.out_features
        yield self._normalize("input gate", None, "hidden", "normed")
        yield from self._project(gate.gate, "normed", "layer rows", inputs_part(block))
        own = values.at + block.layer * size * values.values.itemsize
        yield self._activate(gate.activation, gate.projection, size, gated.at, own, values.stride)
        yield from self._join(block.join, "activated", join_part(block))

    def _scale(self, name: TensorName) -> BoundOperation:
        """The stream times a factor: the stream plus itself times what the factor is beyond one."""
        factor = float(self.weights.vector(name)[0])
        return self._normalize("output scale", None, "hidden", "branch", add_scale=factor - 1.0, begins_block=False)

    def _feed_forward_block(self, block: FeedForwardBlock) -> Iterator[BoundOperation]:
        yield self._normalize("norm", block.inputs.norm, "hidden", "normed")
        yield from self._activated(block.feed_forward, inputs_part(block), self._tiles_together(block.inputs.gated))
        yield from self._join(block.join, "activated", join_part(block))

    def _activated(
        self, feed_forward: FeedForward, part: str, together: int, source: str = "normed"
    ) -> Iterator[BoundOperation]:
        """From `source` to `activated`; `together` as `_tiles_together` gives it."""
        if feed_forward.gate is not None:
            yield from self._clamped(feed_forward.gate, source, "gate", part, barrier=False, together=together)
        yield from self._clamped(feed_forward.up, source, "up", part, barrier=not together, together=together)
        gate, up = self.workspace.buffers["gate"], self.workspace.buffers["up"]
        gated = gate.at if feed_forward.gate is not None else None
        width = feed_forward.up.out_features
        yield self._activate(feed_forward.activation, feed_forward.down, width, gated, up.at, up.stride)

    def _experts_block(self, block: ExpertsBlock) -> Iterator[BoundOperation]:
        (router,), join, norms = block.inputs.linears, block.join, block.experts.norms
        yield self._normalize("norm", block.inputs.norm, "hidden", "normed")
        yield from self._project(router, "normed", "scores", inputs_part(block))
        if norms is not None:
            yield self._normalize("norm", norms.shared, "hidden", "normed", begins_block=False)
        shared, gate = block.experts.shared, block.experts.shared_gate
        if gate is not None:
            yield from self._project(gate, "normed", "shared gate", SHARED_PART)
        if shared is not None:
            together = self._tiles_together(shared if shared.gate is not None else None)
            yield from self._activated(shared, SHARED_PART, together)
            yield from self._project(shared.down, "activated", "shared", SHARED_PART)
        if norms is not None:
            if join.reduce:
                yield from self._add_up("shared")
            yield self._normalize("norm", norms.shared_output, "shared", "shared")
            yield self._normalize("norm", norms.experts, "hidden", "normed", begins_block=False)
        # The sum over experts adds to the stream itself where no norm lies between.
        added = None if join.norm is not None or norms is not None or join.reduce else join.scale
        experts = ExpertsBinder(self.instructions, self.kernels, self.weights, self.workspace, self._block_bytes)
        yield from experts.bind(block.experts, added)
        if join.reduce:
            yield from self._add_up("branch")
        if norms is not None:
            yield self._normalize("norm", norms.experts_output, "branch", "branch", add_scale=1.0, to="shared")
        if added is None:
            yield self._normalize("norm", join.norm, "shared" if norms else "branch", "branch", add_scale=join.scale)

    def _join(self, join: Join, source: str, part: str) -> Iterator[BoundOperation]:
        assert join.linear is not None
        if join.adds_directly and join.linear.clamps is None:
            yield from self._project(join.linear, source, "hidden", part, add_scale=join.scale)
        else:
            yield from self._clamped(join.linear, source, "branch", part)
            if join.reduce:
                yield from self._add_up("branch")
            name = "residual add" if join.norm is None else "norm"
            yield self._normalize(name, join.norm, "branch", "branch", add_scale=join.scale)

    def _add_up(self, name: str) -> Iterator[BoundOperation]:
        """A buffer as wide as the stream becomes the sum of all ranks'."""
        assert self._ranks is not None
        yield from self._ranks.add_up(name, self.weights.hidden_size)

    def _final_norm(self, tail: Tail) -> list[BoundOperation]:
        hidden, selected = self.workspace.buffers["hidden"], self.workspace.buffers["selected"]
        record = self.workspace.record(
            SELECT, count_field=STEP_SELECTED, indices=address(self.workspace.selected), **hidden.fields("input"),
            **selected.fields("out"), width=self.weights.hidden_size,
        )  # fmt: skip
        return [
            BoundOperation("select", select, record),
            self._normalize("final norm", tail.norm, "selected", "selected", count=STEP_SELECTED),
        ]

    def _tiles_together(self, gated: FeedForward | None) -> int:
        """Tiles of a group of the activation that follows, which then needs no barrier; else 0.

        Each thread goes on with what it computed, where the activation of gate and up may follow at once and both
        matmuls are quantised and of whole groups.
        """
        if gated is None:
            return 0
        packed = all(self.weights.is_packed(each) and each.clamps is None for each in gated.linears()[:-1])
        whole = gated.up.out_features % GROUP == 0
        return GROUP // self.instructions.lanes if packed and whole else 0

    def _clamped(
        self, linear: Linear, source: str, target: str, part: str, *, barrier: bool = True, terms: bool = False,
        together: int = 0,
    ) -> Iterator[BoundOperation]:  # fmt: skip
        """`_project`, within the matrix's bounds, where it has some."""
        clamps = linear.clamps
        if clamps is None:
            yield from self._project(linear, source, target, part, barrier=barrier, terms=terms, together=together)
            return
        yield self._clip(part, clamps.read, linear.in_features, source, "clipped")
        yield from self._project(linear, "clipped", target, part)
        yield self._clip(part, clamps.given, linear.out_features, target, target)

    def _clip(self, part: str, bounds: tuple[float, float], width: int, source: str, target: str) -> BoundOperation:
        """target = source within bounds."""
        read, written = self.workspace.buffers[source], self.workspace.buffers[target]
        record = self.workspace.record(
            CLIP, **read.fields("input"), width=width, low=bounds[0], high=bounds[1], **written.fields("out"),
            **written_records(written.records),
        )  # fmt: skip
        return BoundOperation(part, clip, record)

    def _project(
        self, linear: Linear, source: str, target: str, part: str, *, add_scale: float | None = None,
        barrier: bool = True, terms: bool = False, together: int = 0, count: int = STEP_TOKENS, column: int = 0,
    ) -> Iterator[BoundOperation]:  # fmt: skip
        """target = linear(source), or target += add_scale * linear(source); of inputs in an order of the matrix's own
        from the buffer `ordered`.

        Args:
            terms: whether the source is of two terms; see `AttentionBinder.two_terms`.
            together: from `_tiles_together`.
            count: field of the step that has the number of tokens.
            column: of the target, where the result begins.
        """
        matrix, read, written = (
            self.weights.matrices[linear.weight], self.workspace.buffers[source], self.workspace.buffers[target],
        )  # fmt: skip
        if isinstance(matrix, PackedMatrix) and matrix.order is not None:
            ordered, barrier = self.workspace.buffers["ordered"], True
            yield self._reorder(part, matrix.order, read, ordered, count, terms=terms)
            read = ordered
        shared: dict[str, int | float] = {
            "count_field": count,
            "out": written.at + 4 * column,
            "out_stride": written.stride,
            "residual_scale": 1.0 if add_scale is None else float(add_scale),
            "bias": self.weights.vector_at(linear.bias),
        }
        records = read.records
        if terms:
            records = read.terms
            shared["out_stride"] = written.stride // 2
            shared["count_field"] = STEP_TERMS
            if linear.bias is not None:
                shared["bias"] = address(self.weights.half_of(linear.bias))  # both terms add it
        add = add_scale is not None
        if isinstance(matrix, FloatMatrix):
            record = self.workspace.record(
                FLOAT_LINEAR, **shared, weights=address(matrix.weights), tiles=matrix.tiles, columns=matrix.columns,
                tile_stride=matrix.tile_bytes, **read.fields("input"),
            )  # fmt: skip
            kernel = self.kernels.float_linear(matrix.kind, add)
        else:
            assert records is not None  # the workspace has them for every buffer that matmuls read
            record = self.workspace.record(
                LINEAR, **shared, **matrix.fields(self.instructions.lanes), activations=records.at,
                activation_groups=records.groups, together=together, block_bytes=self._block_bytes,
            )  # fmt: skip
            kernel = self.kernels.linear(matrix.weight_format, add)
        yield BoundOperation(part, kernel, record, barrier, matrix.size_bytes)

    def _reorder(
        self, part: str, order: NDArray[np.int32], read: RowBuffer, written: RowBuffer, count: int, *, terms: bool
    ) -> BoundOperation:
        record = self.workspace.record(
            REORDER, count_field=count, **read.fields("input"), width=len(order), order=address(order),
            **written.fields("out"), **written_records(written.records),
            terms=written.terms.at_column(0) if terms and written.terms is not None else 0,
        )  # fmt: skip
        return BoundOperation(part, reorder, record)

    def _normalize(
        self, part: str, norm: Norm | None, source: str, target: str, *, add_scale: float | None = None,
        to: str = "hidden", terms: bool = False, count: int = STEP_TOKENS, begins_block: bool | None = None,
        column: int = 0, width: int | None = None,
    ) -> BoundOperation:  # fmt: skip
        """target = norm(source), and with `add_scale` to += add_scale * target; a norm of None copies.

        Args:
            terms: whether the target has two terms; see `AttentionBinder.two_terms`.
            count: field of the step that has the number of tokens.
            begins_block: see `BoundOperation`; by default where the source is the stream.
            column: of the target, where the result begins: of a group of records.
            width: of the source; None takes that of the norm's weight, or without a norm the stream's.
        """
        read, written = self.workspace.buffers[source], self.workspace.buffers[target]
        total = self.workspace.buffers[to]
        if width is None:
            width = self.weights.length(norm.weight) if norm else min(read.values.shape[1], self.weights.hidden_size)
        record = self.workspace.record(
            NORMALIZE, count_field=count, **read.fields("input"), width=width, kind=norm_kind(norm),
            eps=float(norm.eps) if norm else 0.0, weight=self.weights.norm_at(norm),
            bias=self.weights.vector_at(norm.bias if norm else None), out=written.at + 4 * column,
            out_stride=written.stride, **written_records(written.records, column),
            residual=total.at if add_scale is not None else 0, residual_stride=total.stride,
            residual_scale=float(add_scale or 0.0),
            terms=written.terms.at_column(column) if terms and written.terms is not None else 0,
        )  # fmt: skip
        begins = source == "hidden" if begins_block is None else begins_block
        return BoundOperation(part, normalize, record, begins_block=begins)

    def _activate(
        self, activation: Activation, consumer: Linear | None, width: int, gate: int | None, up: int, stride: int
    ) -> BoundOperation:
        """The input of `consumer`: activation(gate) * up, or activation(up), of `width` floats at addresses; float32
        for None.
        """
        out = self.workspace.buffers["activated"]
        quantised = consumer is not None and self.weights.is_packed(consumer) and consumer.clamps is None
        record = self.workspace.record(
            ACTIVATE, gate=up if gate is None else gate, up=up, input_stride=stride,
            groups=-(-width // GROUP), out=0 if quantised else out.at, out_stride=out.stride,
            source_groups=-(-self.weights.hidden_size // GROUP), block_bytes=self._block_bytes,
            **written_records(out.records if quantised else None) | {"records_width": self.instructions.tile_tokens[0]},
        )  # fmt: skip
        return BoundOperation("activation", self.kernels.activate(activation, gate is not None), record)
