"""A program's operations bound to kernels and addresses: the table that threads walk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.instruction_set import InstructionSet
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.activate import ACTIVATE
from realizar.backends.cpu.kernels.attention import ATTEND, STEP_SELECTED, STEP_TERMS, STEP_TOKENS
from realizar.backends.cpu.kernels.float_linear import FLOAT_LINEAR
from realizar.backends.cpu.kernels.linear import LINEAR
from realizar.backends.cpu.kernels.normalize import LAYER_NORM, NO_NORM, NORMALIZE, RMS_NORM
from realizar.backends.cpu.kernels.rotate import ROTATE
from realizar.backends.cpu.kernels.select import SELECT
from realizar.backends.cpu.kv.memory import KVMemory
from realizar.backends.cpu.records import Record, address, aligned_zeros
from realizar.backends.cpu.rope_tables import RopeTables
from realizar.backends.cpu.walker import OPERATION_FIELDS
from realizar.backends.cpu.weights.formats import GROUP
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.weights.pack import PackedMatrix
from realizar.backends.cpu.weights.pack_floats import FloatMatrix
from realizar.backends.cpu.workspace import RecordBuffer, Workspace
from realizar.backends.machine import read_machine
from realizar.backends.program import Activate, Attend, Normalize, Operation, Project, Rotate, Select
from realizar.models.spec import Attention, Norm

_DEFAULT_L2_BYTES = 1 << 20  # where the system does not tell


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """Operations as int64 [count, 3] (kernel, arguments, barrier), and the argument records that they point to."""

    table: NDArray[np.int64]
    arguments: tuple[NDArray[np.int64], ...]

    @property
    def at(self) -> int:
        return address(self.table)

    @property
    def count(self) -> int:
        return len(self.table)


class Binder:
    """Binds operations. `selected` says whether rows are the step's tokens or the selected rows."""

    def __init__(
        self, instructions: InstructionSet, kernels: KernelLibrary, weights: Weights, workspace: Workspace,
        kv: KVMemory, ropes: RopeTables, scratch: NDArray[np.uint8], partial: NDArray[np.float32],
    ) -> None:  # fmt: skip
        self.instructions, self.kernels, self.weights = instructions, kernels, weights
        self.workspace, self.kv, self.ropes = workspace, kv, ropes
        self.scratch, self.partial = scratch, partial  # a row per thread; segments of split attention
        self._block_bytes = read_machine().cache_bytes.get("L2", _DEFAULT_L2_BYTES) // 2

    def bind(self, operations: tuple[Operation, ...], selected: bool) -> BoundProgram:
        self._count = STEP_SELECTED if selected else STEP_TOKENS
        attentions = [operation.attention for operation in operations if isinstance(operation, Rotate)]
        self._two_terms = {attention.v.weight for attention in attentions if self.two_terms(attention)}
        bound: list[tuple[int, NDArray[np.int64], bool]] = []
        for index, operation in enumerate(operations):
            bound.extend(self._bind(operation, operations[index + 1 :]))
        table = aligned_zeros(len(bound) * OPERATION_FIELDS, np.int64).reshape(-1, OPERATION_FIELDS)
        for row, (kernel, arguments, barrier) in zip(table, bound, strict=True):
            row[:] = kernel, address(arguments), barrier
        table[-1, 2] = 1  # a walk ends with all threads done
        return BoundProgram(table, tuple(arguments for _, arguments, _ in bound))  # type: ignore[arg-type]

    def two_terms(self, attention: Attention) -> bool:
        """Whether V multiplies activations of two terms: int8, and int8 of what that leaves over, about 15 bits.

        Rounding before V costs more fidelity than before any other product of a layer (on SmolLM2-135M a quarter of the
        whole divergence), and with grouped queries V is the smallest. The terms go through the product as two tokens.
        """
        quantised = isinstance(self.weights.matrices[attention.v.weight], PackedMatrix)
        return quantised and 2 * attention.num_kv_heads <= attention.num_heads

    def _bind(
        self, operation: Operation, following: tuple[Operation, ...]
    ) -> list[tuple[int, NDArray[np.int64], bool]]:
        if isinstance(operation, Project):
            together = self._tiles_together(operation, following)
            kernel, arguments = self._project(operation, together)
            after = following[0] if following else None
            same_source = isinstance(after, Project) and after.source == operation.source
            return [(kernel, arguments, not same_source and not together)]
        if isinstance(operation, Normalize):
            return [(self.kernels.normalize, self._normalize(operation, following), True)]
        if isinstance(operation, Rotate):
            return [(self.kernels.rotate(self.kv.dtype), self._rotate(operation), True)]
        if isinstance(operation, Attend):
            arguments = self._attend(operation)
            return [(self.kernels.attend(self.kv.dtype), arguments, True), (self.kernels.combine, arguments, True)]
        if isinstance(operation, Activate):
            return [self._activate(operation)]
        assert isinstance(operation, Select)
        return [(self.kernels.select, self._select(), True)]

    def _pack(self, record: Record, **values: float) -> NDArray[np.int64]:
        return record.pack({"step": address(self.workspace.step), **values})

    def _tiles_together(self, operation: Project, following: tuple[Operation, ...]) -> int:
        """Tiles of a group of the activation that follows, which then needs no barrier; else 0.

        Each thread goes on with what it computed, where both products are quantised and of whole groups.
        """
        feed_forward = next((later.feed_forward for later in following[:2] if isinstance(later, Activate)), None)
        if feed_forward is None or operation.linear not in (feed_forward.gate, feed_forward.up):
            return 0
        linears = [linear for linear in (feed_forward.gate, feed_forward.up) if linear is not None]
        packed = all(isinstance(self.weights.matrices[linear.weight], PackedMatrix) for linear in linears)
        return GROUP // self.instructions.lanes if packed and feed_forward.up.out_features % GROUP == 0 else 0

    def _project(self, operation: Project, together: int) -> tuple[int, NDArray[np.int64]]:
        linear, matrix = operation.linear, self.weights.matrices[operation.linear.weight]
        source, target = self.workspace.buffers[operation.source], self.workspace.buffers[operation.target]
        add = operation.add_scale is not None
        shared: dict[str, int | float] = {
            "count_field": self._count,
            "out": target.at,
            "out_stride": target.stride,
            "residual_scale": float(operation.add_scale) if operation.add_scale is not None else 1.0,
            "bias": address(self.weights.vector(linear.bias)) if linear.bias is not None else 0,
        }
        records = source.records
        if linear.weight in self._two_terms:
            records = source.terms
            shared["out_stride"] = target.stride // 2
            shared["count_field"] = STEP_TERMS
            if linear.bias is not None:
                shared["bias"] = address(self.weights.half_of(linear.bias))  # both terms add it
        if isinstance(matrix, FloatMatrix):
            record = self._pack(
                FLOAT_LINEAR, **shared, weights=address(matrix.weights), tiles=matrix.tiles, columns=matrix.columns,
                tile_stride=matrix.size_bytes // matrix.tiles, input=source.at, input_stride=source.stride,
            )  # fmt: skip
            return self.kernels.float_linear(matrix.kind, add), record
        shared["together"], shared["block_bytes"] = together, self._block_bytes
        return self.kernels.linear(matrix.weight_format, add), self._linear(matrix, shared, records)

    def _linear(
        self, matrix: PackedMatrix, shared: dict[str, int | float], records: RecordBuffer | None
    ) -> NDArray[np.int64]:
        assert records is not None  # the workspace has them for every buffer that products read
        own = matrix.fields(self.instructions.lanes)
        return self._pack(LINEAR, **shared, **own, activations=records.at, activation_groups=records.groups)

    def _normalize(self, operation: Normalize, following: tuple[Operation, ...]) -> NDArray[np.int64]:
        source, target = self.workspace.buffers[operation.source], self.workspace.buffers[operation.target]
        hidden, norm = self.workspace.buffers["hidden"], operation.norm
        add = operation.add_scale
        readers = itertools.takewhile(lambda later: isinstance(later, Project), following)
        second = any(reader.linear.weight in self._two_terms for reader in readers if isinstance(reader, Project))
        return self._pack(
            NORMALIZE, count_field=self._count, input=source.at, input_stride=source.stride,
            width=self._norm_width(norm, source.values.shape[1]), kind=_norm_kind(norm),
            eps=float(norm.eps) if norm else 0.0,
            weight=address(self.weights.norm_weight(norm)) if norm else 0,
            bias=address(self.weights.vector(norm.bias)) if norm and norm.bias else 0,
            out=target.at, out_stride=target.stride, **_records(target.records),
            residual=hidden.at if add is not None else 0, residual_stride=hidden.stride,
            residual_scale=float(add) if add is not None else 0.0,
            terms=target.terms.at if second and target.terms is not None else 0,
        )  # fmt: skip

    def _norm_width(self, norm: Norm | None, padded: int) -> int:
        return self.weights.length(norm.weight) if norm else min(padded, self.weights.hidden_size)

    def _rotate(self, operation: Rotate) -> NDArray[np.int64]:
        attention, layout = operation.attention, self.kv.layouts[operation.layer]
        query, key, value = (self.workspace.buffers[name] for name in ("query", "key", "value"))
        cosine, sine = self.ropes.addresses(attention.rope)
        per_head = attention.qk_norm_axis == "head"
        q_norm, k_norm = (attention.q_norm, attention.k_norm) if per_head else (None, None)
        either = q_norm or k_norm
        return self._pack(
            ROTATE, query=query.at, query_stride=query.stride, key=key.at, key_stride=key.stride, value=value.at,
            value_stride=value.stride, second_value=value.stride // 2 if attention.v.weight in self._two_terms else 0,
            num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads, head_size=attention.head_size,
            cosine=cosine, sine=sine, rotary=attention.rope.size if attention.rope else 0,
            interleaved=int(attention.rope is not None and attention.rope.pairing == "interleaved"),
            query_norm=address(self.weights.norm_weight(q_norm)) if q_norm else 0,
            key_norm=address(self.weights.norm_weight(k_norm)) if k_norm else 0,
            norm_kind=_norm_kind(either), eps=float(either.eps) if either else 0.0,
            query_norm_bias=address(self.weights.vector(q_norm.bias)) if q_norm and q_norm.bias else 0,
            key_norm_bias=address(self.weights.vector(k_norm.bias)) if k_norm and k_norm.bias else 0,
            slots=address(self.workspace.slots[self.kv.group_of(operation.layer)]),
            cache=self.kv.address_of(operation.layer), block_bytes=layout.block_bytes, head_bytes=layout.head_bytes,
            plane_bytes=layout.plane_bytes, scale_bytes=layout.scale_bytes, block_size=layout.block_size,
        )  # fmt: skip

    def _attend(self, operation: Attend) -> NDArray[np.int64]:
        attention, layout = operation.attention, self.kv.layouts[operation.layer]
        query, attended = self.workspace.buffers["query"], self.workspace.buffers["attended"]
        tables = self.workspace.block_tables[self.kv.group_of(operation.layer)]
        return self._pack(
            ATTEND, query=query.at, query_stride=query.stride, num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads, head_size=attention.head_size, scale=float(attention.scale),
            window=attention.window or 0, soft_cap=float(attention.soft_cap or 0.0),
            sinks=address(self.weights.vector(attention.sinks)) if attention.sinks else 0,
            cache=self.kv.address_of(operation.layer), block_bytes=layout.block_bytes, head_bytes=layout.head_bytes,
            plane_bytes=layout.plane_bytes, scale_bytes=layout.scale_bytes, block_size=layout.block_size,
            rows=address(self.workspace.rows), block_table=address(tables), table_stride=int(tables.strides[0]),
            scratch=address(self.scratch), scratch_bytes=int(self.scratch.strides[0]), out=attended.at,
            out_stride=attended.stride, partial=address(self.partial),
            **_records(attended.records if self._quantised(attention) else None),
        )  # fmt: skip

    def _quantised(self, attention: Attention) -> bool:
        return isinstance(self.weights.matrices[attention.o.weight], PackedMatrix)

    def _activate(self, operation: Activate) -> tuple[int, NDArray[np.int64], bool]:
        feed_forward = operation.feed_forward
        gate, up, out = (self.workspace.buffers[name] for name in ("gate", "up", "activated"))
        gated = feed_forward.gate is not None
        quantised = isinstance(self.weights.matrices[feed_forward.down.weight], PackedMatrix)
        record = self._pack(
            ACTIVATE, count_field=self._count, gate=gate.at, up=up.at, input_stride=up.stride,
            groups=-(-feed_forward.up.out_features // GROUP), out=0 if quantised else out.at, out_stride=out.stride,
            source_groups=-(-self.weights.hidden_size // GROUP), block_bytes=self._block_bytes,
            **_records(out.records if quantised else None),
        )  # fmt: skip
        return self.kernels.activate(feed_forward.activation, gated), record, True

    def _select(self) -> NDArray[np.int64]:
        hidden, selected = self.workspace.buffers["hidden"], self.workspace.buffers["selected"]
        return self._pack(
            SELECT, count_field=STEP_SELECTED, indices=address(self.workspace.selected), input=hidden.at,
            input_stride=hidden.stride, out=selected.at, out_stride=selected.stride, width=self.weights.hidden_size,
        )  # fmt: skip


def _norm_kind(norm: Norm | None) -> int:
    return NO_NORM if norm is None else {"rms": RMS_NORM, "layer": LAYER_NORM}[norm.kind]


def _records(buffer: RecordBuffer | None) -> dict[str, int]:
    """The fields by which a kernel finds the records that it writes; none are written without a buffer."""
    if buffer is None:
        return {"records": 0, "records_groups": 0, "records_width": 1}
    return {"records": buffer.at, "records_groups": buffer.groups, "records_width": buffer.width}
