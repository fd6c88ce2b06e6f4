"""Mixtures bound to kernels: the choice of experts, their matmuls and sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.vector_math import CLAMPED
from realizar.backends.cpu.instruction_set import InstructionSet
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.expert_linear import EXPERT_ACTIVATE, EXPERT_FLOAT_LINEAR, EXPERT_LINEAR
from realizar.backends.cpu.kernels.routing import CHOOSE, GATHER, SORT, SUM, choose, gather, sort_by_expert, sum_experts
from realizar.backends.cpu.operations import BoundOperation
from realizar.backends.cpu.records import address
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.weights.pack import FloatMatrix
from realizar.backends.cpu.workspace import Workspace, pairs_of_item, written_records
from realizar.models.spec import ExpertLinear, Experts


@dataclass(frozen=True, slots=True)
class ExpertsBinder:
    """Binds mixtures, whose kernels meet in the arrays of `workspace.routing`.

    `block_bytes` are of activations that stay in the second-level cache.
    """

    instructions: InstructionSet
    kernels: KernelLibrary
    weights: Weights
    workspace: Workspace
    block_bytes: int

    def bind(self, experts: Experts, add_scale: float | None) -> Iterator[BoundOperation]:
        """From the buffers `scores` and `normed` to hidden += add_scale * output, or branch = output with None.

        A shared expert's output and gate lie in `shared` and `shared gate`; where the mixture has norms of its own, the
        output is without it.
        """
        *inputs, down = map(self.weights.is_packed, experts.expert_linears())
        whole = all(inputs) and experts.up.out_features % GROUP == 0
        together = GROUP // self.instructions.lanes if whole else 1  # threads go on with a group that they computed
        yield self._choose(experts)
        yield self._sort(experts)
        yield self._gather(experts, inputs)
        if experts.gate is not None:
            yield self._multiply(experts.gate, "routed", "expert gate", "expert gate and up", together, barrier=False)
        barrier = together == 1
        yield self._multiply(experts.up, "routed", "expert up", "expert gate and up", together, barrier=barrier)
        yield self._activate(experts, quantised=down)
        yield self._multiply(experts.down, "expert activated", "routed", "expert down", 1)
        yield self._sum(experts, add_scale)

    def _choose(self, experts: Experts) -> BoundOperation:
        scores, routing = self.workspace.buffers["scores"], self.workspace.routing
        record = self.workspace.record(
            CHOOSE, **scores.fields("scores"), experts=experts.num_experts, per_token=experts.experts_per_token,
            normalized=experts.normalized, scale=float(experts.scale), chosen=address(routing.chosen),
            weights=address(routing.weights), sigmoid=experts.scoring == "sigmoid", groups=experts.num_groups,
            groups_per_token=experts.groups_per_token, bias=self.weights.vector_at(experts.selection_bias),
            expert_scales=self.weights.vector_at(experts.expert_scales),
        )  # fmt: skip
        return BoundOperation("choice of experts", choose, record)

    def _sort(self, experts: Experts) -> BoundOperation:
        routing, width = self.workspace.routing, self.workspace.block_tokens
        record = self.workspace.record(
            SORT, experts=experts.num_experts, per_token=experts.experts_per_token, chosen=address(routing.chosen),
            positions=address(routing.positions), starts=address(routing.starts), items=address(routing.items),
            counts=address(routing.counts), width=width,
            run=pairs_of_item(experts.up.in_features, self.block_bytes, width),
        )  # fmt: skip
        return BoundOperation("choice of experts", sort_by_expert, record)

    def _gather(self, experts: Experts, packed: list[bool]) -> BoundOperation:
        read, written = self.workspace.buffers["normed"], self.workspace.buffers["routed"]
        assert read.records is not None
        assert written.records is not None  # matmuls read both buffers
        groups = read.records.groups
        record = self.workspace.record(
            GATHER, per_token=experts.experts_per_token, positions=address(self.workspace.routing.positions),
            **read.fields("input"), columns=groups * GROUP, out=0 if all(packed) else written.at,
            out_stride=written.stride, records=read.records.at, out_records=written.records.at if any(packed) else 0,
            groups=groups, width=read.records.width,
        )  # fmt: skip
        return BoundOperation("choice of experts", gather, record)

    def _multiply(
        self, linear: ExpertLinear, source: str, target: str, part: str, together: int, *, barrier: bool = True
    ) -> BoundOperation:
        """Each position of the target from the same one of the source, by the matrix of its expert."""
        matrix, routing = self.weights.matrices[linear.weight], self.workspace.routing
        read, written = self.workspace.buffers[source], self.workspace.buffers[target]
        shared = {
            "counts": address(routing.counts), "items": address(routing.items), "tiles": matrix.tiles,
            **written.fields("out"), "bias": 0, "bias_stride": 0,
        }  # fmt: skip
        if linear.bias is not None:
            biases = self.weights.expert_biases(linear.bias)
            shared |= {"bias": address(biases), "bias_stride": int(biases.strides[0])}
        if isinstance(matrix, FloatMatrix):
            record = EXPERT_FLOAT_LINEAR.pack({
                **shared, "weights": address(matrix.weights), "tile_stride": matrix.tile_bytes,
                "columns": matrix.columns, **read.fields("input"),
            })  # fmt: skip
            kernel = self.kernels.expert_float_linear(matrix.kind)
        else:
            assert read.records is not None  # matmuls read this buffer
            record = EXPERT_LINEAR.pack({
                **matrix.fields(self.instructions.lanes), **shared, "activations": read.records.at,
                "activation_groups": read.records.groups, "together": together,
            })  # fmt: skip
            kernel = self.kernels.expert_linear(matrix.weight_format)
        size = matrix.size_bytes // matrix.count
        return BoundOperation(part, kernel, record, barrier, size, is_of_experts=True)

    def _activate(self, experts: Experts, *, quantised: bool) -> BoundOperation:
        gate, up, out = (self.workspace.buffers[name] for name in ("expert gate", "expert up", "expert activated"))
        routing = self.workspace.routing
        record = EXPERT_ACTIVATE.pack({
            "counts": address(routing.counts), "items": address(routing.items), "gate": gate.at, "up": up.at,
            "input_stride": up.stride, "groups": -(-experts.up.out_features // GROUP),
            "out": 0 if quantised else out.at, "out_stride": out.stride,
            **written_records(out.records if quantised else None),
        })  # fmt: skip
        activation = CLAMPED if experts.clamped else experts.activation
        return BoundOperation(
            "expert activation", self.kernels.expert_activate(activation, experts.gate is not None), record
        )

    def _sum(self, experts: Experts, add_scale: float | None) -> BoundOperation:
        routing, add = self.workspace.routing, add_scale is not None
        buffers = self.workspace.buffers
        read, written = buffers["routed"], buffers["hidden" if add else "branch"]
        shared = buffers["shared"] if experts.shared is not None and experts.norms is None else None
        gate = buffers["shared gate"] if experts.shared_gate is not None else None
        record = self.workspace.record(
            SUM, per_token=experts.experts_per_token, positions=address(routing.positions),
            weights=address(routing.weights), **read.fields("input"), width=experts.down.out_features,
            **written.fields("out"), add=add, scale=float(add_scale or 0.0),
            shared=shared.at if shared else 0, shared_stride=shared.stride if shared else 0,
            shared_gate=gate.at if gate else 0, shared_gate_stride=gate.stride if gate else 0,
        )  # fmt: skip
        return BoundOperation("sum over experts", sum_experts, record)
