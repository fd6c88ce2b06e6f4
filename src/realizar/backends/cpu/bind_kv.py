"""Attention bound to kernels: norms of heads, rope, and attention over the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.attention import ATTEND
from realizar.backends.cpu.kernels.normalize import norm_kind
from realizar.backends.cpu.kernels.rotate import ROTATE
from realizar.backends.cpu.kv.memory import KVMemory
from realizar.backends.cpu.operations import BoundOperation
from realizar.backends.cpu.records import Record, address, aligned_zeros
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.weights.pack import PackedMatrix
from realizar.backends.cpu.workspace import Workspace, written_records
from realizar.models.mixers import SharedAttention
from realizar.models.parts import QueryGrowth, Rope
from realizar.models.spec import Attention, ModelSpec


@dataclass(frozen=True, slots=True)
class AttentionBinder:
    """Binds attention from the buffers `query`, `key`, `value` and `attention gate` to `attended`.

    `scratch` is uint8 [threads, bytes]; `partial` float32, for segments of split attention.
    """

    kernels: KernelLibrary
    weights: Weights
    workspace: Workspace
    kv: KVMemory
    ropes: RopeTables
    scratch: NDArray[np.uint8]
    partial: NDArray[np.float32]

    def two_terms(self, attention: Attention) -> bool:
        """True if V multiplies activations of two terms, about 15 bits: int8, and int8 of its rounding error.

        Rounding before V costs more fidelity than before any other matmul of a layer (on SmolLM2-135M a quarter of the
        whole divergence), and with grouped queries V is the smallest. The terms go through the matmul as two tokens.
        """
        quantised = isinstance(self.weights.matrices[attention.v.weight], PackedMatrix)
        return quantised and 2 * attention.num_kv_heads <= attention.num_heads

    def rotate(self, attention: Attention, layer: int, *, terms: bool) -> BoundOperation:
        """Norms of heads and rope; keys and values go into the cache. For `terms` see `two_terms`."""
        return BoundOperation("rope", self.kernels.rotate(self.kv.dtype), self._rotate(attention, layer, terms))

    def rotate_queries(self, attention: SharedAttention) -> BoundOperation:
        return BoundOperation("rope", self.kernels.rotate(self.kv.dtype), self._rotate_queries(attention))

    def attend(self, attention: Attention | SharedAttention, layer: int) -> Iterator[BoundOperation]:
        arguments = self._attend_record(attention, layer)
        yield BoundOperation("attention", self.kernels.attend(self.kv.dtype), arguments, attention=attention)
        yield BoundOperation("attention output", self.kernels.combine, arguments)

    def _rotate(self, attention: Attention, layer: int, terms: bool) -> NDArray[np.int64]:
        layout = self.kv.layouts[layer]
        query, key, value = (self.workspace.buffers[name] for name in ("query", "key", "value"))
        cosine, sine = self.ropes.addresses(attention.rope)
        per_head = attention.qk_norm_axis == "head"
        q_norm, k_norm = (attention.q_norm, attention.k_norm) if per_head else (None, None)
        either = q_norm or k_norm
        return self._pack(
            ROTATE, query=query.at, query_stride=query.stride, key=key.at, key_stride=key.stride, value=value.at,
            value_stride=value.stride, second_value=value.stride // 2 if terms else 0,
            num_heads=attention.num_heads, num_kv_heads=attention.num_kv_heads, head_size=attention.head_size,
            cosine=cosine, sine=sine, rotary=attention.rope.size if attention.rope else 0,
            interleaved=int(attention.rope is not None and attention.rope.pairing == "interleaved"),
            query_norm=address(self.weights.norm_weight(q_norm)) if q_norm else 0,
            key_norm=address(self.weights.norm_weight(k_norm)) if k_norm else 0,
            norm_kind=norm_kind(either), eps=float(either.eps) if either else 0.0,
            query_norm_bias=address(self.weights.vector(q_norm.bias)) if q_norm and q_norm.bias else 0,
            key_norm_bias=address(self.weights.vector(k_norm.bias)) if k_norm and k_norm.bias else 0,
            slots=address(self.workspace.slots[self.kv.group_of(layer)]),
            cache=self.kv.address_of(layer), block_bytes=layout.block_bytes, head_bytes=layout.head_bytes,
            plane_bytes=layout.plane_bytes, scale_bytes=layout.scale_bytes, block_size=layout.block_size,
            query_scales=self.ropes.query_scales(attention.query_growth), value_eps=float(attention.v_norm_eps or 0.0),
        )  # fmt: skip

    def _rotate_queries(self, attention: SharedAttention) -> NDArray[np.int64]:
        query, norm = self.workspace.buffers["query"], attention.q_norm
        cosine, sine = self.ropes.addresses(attention.rope)
        unused = dict.fromkeys((
            "num_kv_heads", "key", "key_stride", "value", "value_stride", "second_value", "key_norm", "key_norm_bias",
            "slots", "cache", "block_bytes", "head_bytes", "plane_bytes", "scale_bytes", "query_scales", "value_eps",
        ), 0)  # fmt: skip
        return self._pack(
            ROTATE, query=query.at, query_stride=query.stride, num_heads=attention.num_heads,
            head_size=attention.head_size, cosine=cosine, sine=sine,
            rotary=attention.rope.size if attention.rope else 0,
            interleaved=int(attention.rope is not None and attention.rope.pairing == "interleaved"),
            query_norm=address(self.weights.norm_weight(norm)) if norm else 0, norm_kind=norm_kind(norm),
            eps=float(norm.eps) if norm else 0.0,
            query_norm_bias=address(self.weights.vector(norm.bias)) if norm and norm.bias else 0,
            block_size=self.kv.block_size, **unused,
        )  # fmt: skip

    def _attend_record(self, attention: Attention | SharedAttention, layer: int) -> NDArray[np.int64]:
        layout = self.kv.layouts[layer]
        sinks, gate = (attention.sinks, attention.gate) if isinstance(attention, Attention) else (None, None)
        gates = None if gate is None else self.workspace.buffers["attention gate"]
        query, attended = self.workspace.buffers["query"], self.workspace.buffers["attended"]
        tables = self.workspace.block_tables[self.kv.group_of(layer)]
        return self._pack(
            ATTEND, query=query.at, query_stride=query.stride, num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads, head_size=attention.head_size, scale=float(attention.scale),
            window=attention.window or 0, soft_cap=float(attention.soft_cap or 0.0),
            sinks=address(self.weights.vector(sinks)) if sinks else 0,
            cache=self.kv.address_of(layer), block_bytes=layout.block_bytes, head_bytes=layout.head_bytes,
            plane_bytes=layout.plane_bytes, scale_bytes=layout.scale_bytes, block_size=layout.block_size,
            rows=address(self.workspace.rows), block_table=address(tables), table_stride=int(tables.strides[0]),
            scratch=address(self.scratch), scratch_bytes=int(self.scratch.strides[0]), out=attended.at,
            out_stride=attended.stride, partial=address(self.partial), gate=0 if gates is None else gates.at,
            gate_stride=0 if gates is None else gates.stride,
            **written_records(attended.records if self._quantised(attention) else None),
        )  # fmt: skip

    def _quantised(self, attention: Attention | SharedAttention) -> bool:
        return isinstance(self.weights.matrices[attention.o.weight], PackedMatrix)

    def _pack(self, record: Record, **values: float) -> NDArray[np.int64]:
        return record.pack({"step": address(self.workspace.step), **values})


class RopeTables:
    """float32 [tokens, half] cosines and sines, and [tokens] factors of queries, rewritten every step."""

    def __init__(self, spec: ModelSpec, max_tokens: int) -> None:
        ropes = {attention.rope for _, attention in spec.all_attentions() if attention.rope is not None}
        self._frequencies: dict[Rope, NDArray[np.float32]] = {
            rope: np.array(rope.inverse_frequencies, np.float32) for rope in ropes
        }
        self._tables = {
            rope: [aligned_zeros(max_tokens * values.size, np.float32) for _ in range(2)]
            for rope, values in self._frequencies.items()
        }
        growths = {attention.query_growth for _, attention in spec.attentions() if attention.query_growth is not None}
        self._growths = {growth: aligned_zeros(max_tokens, np.float32) for growth in growths}

    def query_scales(self, growth: QueryGrowth | None) -> int:
        """Zero where queries do not grow."""
        return 0 if growth is None else address(self._growths[growth])

    def addresses(self, rope: Rope | None) -> tuple[int, int]:
        """Addresses of cosines and sines; zeros without rope."""
        if rope is None:
            return 0, 0
        cosine, sine = self._tables[rope]
        return address(cosine), address(sine)

    def fill(self, positions: NDArray[np.int32]) -> None:
        """Write the rows of a step's tokens, whose positions are int32 [tokens]; angles are float32, as in training."""
        for rope, frequencies in self._frequencies.items():
            angles = (positions.astype(np.float32)[:, None] * frequencies).ravel()
            cosine, sine = self._tables[rope]
            np.multiply(np.cos(angles), np.float32(rope.magnitude), out=cosine[: angles.size])
            np.multiply(np.sin(angles), np.float32(rope.magnitude), out=sine[: angles.size])
        for growth, factors in self._growths.items():
            factors[: positions.size] = 1 + growth.factor * np.log(1 + positions // growth.period)
