"""Attention bound to kernels: norms of heads, rope, and attention over the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.attention import combine
from realizar.backends.cpu.kernels.attention_record import ATTEND
from realizar.backends.cpu.kernels.normalize import norm_kind
from realizar.backends.cpu.kernels.rotate import ROTATE
from realizar.backends.cpu.kv.memory import KVMemory
from realizar.backends.cpu.kv.pictures import PictureKeys
from realizar.backends.cpu.operations import BoundOperation
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.workspace import Workspace, written_records
from realizar.models.mixers import SharedAttention
from realizar.models.parts import Norm, QueryGrowth, Rope
from realizar.models.spec import Attention, LayerStack


@dataclass(frozen=True, slots=True)
class AttentionBinder:
    """Binds attention from the buffers `query`, `key`, `value` and `attention gate` to `attended`.

    `scratch` is uint8 [threads, bytes]; `partial` float32, for segments of split attention. In a tower all
    tokens of a row see each other, and `windows` are the step and the rows of layers with windows.
    """

    kernels: KernelLibrary
    weights: Weights
    workspace: Workspace
    kv: KVMemory | PictureKeys
    ropes: RopeTables
    scratch: NDArray[np.uint8]
    partial: NDArray[np.float32]
    windows: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

    def two_terms(self, attention: Attention) -> bool:
        """True if V multiplies activations of two terms, about 15 bits: int8, and int8 of its rounding error.

        Rounding before V costs more fidelity than before any other matmul of a layer (on SmolLM2-135M a quarter of the
        whole divergence), and with grouped queries V is the smallest. The terms go through the matmul as two tokens.
        """
        is_small = 2 * attention.num_kv_heads <= attention.num_heads
        return is_small and self.weights.has_codes(attention.v) and attention.v.clamps is None

    def rotate(self, attention: Attention, layer: int, *, terms: bool) -> BoundOperation:
        """Norms of heads and rope; keys and values go into the cache. For `terms` see `two_terms`."""
        layout, per_head = self.kv.layouts[layer], attention.qk_norm_axis == "head"
        key, value = self.workspace.buffers["key"], self.workspace.buffers["value"]
        k_norm = attention.k_norm if per_head else None
        return self._rotate(
            attention, attention.q_norm if per_head else None, k_norm, **key.fields("key"), **value.fields("value"),
            second_value=value.stride // 2 if terms else 0, num_kv_heads=attention.num_kv_heads,
            key_norm=self.weights.norm_at(k_norm),
            key_norm_bias=self.weights.vector_at(k_norm.bias if k_norm else None),
            slots=address(self.workspace.slots[self.kv.group_of(layer)]), cache=self.kv.address_of(layer),
            **layout.fields(), query_scales=self.ropes.query_scales(attention.query_growth),
            value_eps=float(attention.v_norm_eps or 0.0),
        )  # fmt: skip

    def rotate_queries(self, attention: SharedAttention) -> BoundOperation:
        return self._rotate(attention, attention.q_norm, None, block_size=self.kv.block_size)

    def attend(self, attention: Attention | SharedAttention, layer: int) -> Iterator[BoundOperation]:
        arguments = self._attend_record(attention, layer)
        yield BoundOperation("attention", self.kernels.attend(self.kv.dtype), arguments, attention=attention)
        yield BoundOperation("attention output", combine, arguments)

    def _rotate(
        self, attention: Attention | SharedAttention, q_norm: Norm | None, k_norm: Norm | None, **of_keys: float
    ) -> BoundOperation:
        """Of keys and values what `of_keys` says; without any the rest of their fields is 0."""
        rope, either = attention.rope, q_norm or k_norm
        cosine, sine = self.ropes.addresses(rope)
        fields = {
            **dict.fromkeys(ROTATE.names, 0), **self.workspace.buffers["query"].fields("query"),
            "num_heads": attention.num_heads, "head_size": attention.head_size, "cosine": cosine, "sine": sine,
            "rotary": rope.size if rope else 0, "interleaved": rope is not None and rope.pairing == "interleaved",
            "query_norm": self.weights.norm_at(q_norm), "norm_kind": norm_kind(either),
            "query_norm_bias": self.weights.vector_at(q_norm.bias if q_norm else None),
            "eps": float(either.eps) if either else 0.0, "step": address(self.workspace.step),
        }  # fmt: skip
        return BoundOperation("rope", self.kernels.rotate(self.kv.dtype), ROTATE.pack({**fields, **of_keys}))

    def _attend_record(self, attention: Attention | SharedAttention, layer: int) -> NDArray[np.int64]:
        space, kv, window = self.workspace, self.kv, attention.window or 0
        step, rows, whole = space.step, space.rows, self.windows is not None
        if self.windows is not None and window:
            (step, rows), window = self.windows, 0
        buffers, tables = space.buffers, space.block_tables[kv.group_of(layer)]
        gates = {"gate": 0, "gate_stride": 0} if attention.gate is None else buffers["attention gate"].fields("gate")
        attended = buffers["attended"]
        return self.workspace.record(
            ATTEND, **buffers["query"].fields("query"), num_heads=attention.num_heads, step=address(step),
            num_kv_heads=attention.num_kv_heads, head_size=attention.head_size, scale=float(attention.scale),
            window=window, soft_cap=float(attention.soft_cap or 0.0),
            sinks=self.weights.vector_at(attention.sinks), cache=kv.address_of(layer),
            **kv.layouts[layer].fields(), rows=address(rows), block_table=address(tables),
            table_stride=int(tables.strides[0]),
            scratch=address(self.scratch), scratch_bytes=int(self.scratch.strides[0]), **attended.fields("out"),
            partial=address(self.partial), whole=whole,
            seen=address(space.seen) if attention.sees_images_whole else 0, **gates,
            **written_records(attended.records if self.weights.is_packed(attention.o) else None),
        )  # fmt: skip


class RopeTables:
    """float32 [tokens, half] cosines and sines, and [tokens] factors of queries, rewritten every step."""

    def __init__(self, spec: LayerStack, max_tokens: int) -> None:
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
        """Write the rows of a step's tokens, whose positions are int32 [tokens], or [axes, tokens] for ropes of axes.

        Angles are float32, as in training.
        """
        first = positions if positions.ndim == 1 else positions[0]
        for rope, frequencies in self._frequencies.items():
            own = positions[list(rope.axes)].T if rope.axes and positions.ndim > 1 else first[:, None]
            angles = (own.astype(np.float32) * frequencies).ravel()
            cosine, sine = self._tables[rope]
            np.multiply(np.cos(angles), np.float32(rope.magnitude), out=cosine[: angles.size])
            np.multiply(np.sin(angles), np.float32(rope.magnitude), out=sine[: angles.size])
        for growth, factors in self._growths.items():
            factors[: first.size] = 1 + growth.factor * np.log(1 + first // growth.period)
