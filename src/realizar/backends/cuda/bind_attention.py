"""Rope and attention bound to kernels and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import (
    KEYS,
    ROTATE_PARTS,
    TRITON_TYPES,
    decode_splits,
    padded_head,
    row_in_blocks,
    shared_heads,
    whole_row,
)
from realizar.backends.cuda.kernels.activate import combine, convert
from realizar.backends.cuda.kernels.attend import attend_chunk, attend_decode
from realizar.backends.cuda.kernels.normalize import normalize_product
from realizar.backends.cuda.kernels.rotate import rotate
from realizar.backends.cuda.kv_memory import KVMemory
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.linears import MergedLinear
from realizar.backends.cuda.rope_tables import RopeTables
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.weights import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import Attend, Rotate
from realizar.models.spec import Attention, Norm

_NORM_KINDS = {"rms": 1, "layer": 2}


class AttentionBinder:
    """Binds what happens between the QKV product and the output projection.

    Args:
        fixed_splits: whether contexts are cut into the same number of parts for every batch.
    """

    def __init__(
        self, weights: Weights, workspace: Workspace, kv: KVMemory, ropes: RopeTables, device: DeviceProfile,
        context_length: int, fixed_splits: bool,
    ) -> None:  # fmt: skip
        self._weights, self._space, self._kv, self._ropes = weights, workspace, kv, ropes
        self._device, self._context, self._fixed = device, context_length, fixed_splits
        self._none = torch.zeros(1, device=device.torch_device)

    def bind_rotate(self, operation: Rotate, linear: MergedLinear) -> Iterator[Launch]:
        by_row = operation.attention.qk_norm_axis == "row"
        if by_row:
            yield Launch("row norm", self._norm_rows(operation.attention, linear))
        yield Launch("rope", self._rotate(operation, linear, by_row))

    def bind_attend(self, operation: Attend, reader: MergedLinear) -> Iterator[Launch]:
        yield Launch("attention", self._attend(operation), attention=operation.attention)
        yield Launch("join", self._join(operation.attention, reader))

    def splits(self, attention: Attention, shape: StepShape) -> int:
        return decode_splits(attention, shape.decodes, self._context, self._device, self._fixed)

    def _columns(self, attention: Attention) -> tuple[int, int]:
        """Where keys and values start in a row of the product."""
        queries = attention.num_heads * attention.head_size
        return queries, queries + attention.num_kv_heads * attention.head_size

    def _norm_rows(self, attention: Attention, linear: MergedLinear) -> Callable[[StepShape], None]:
        """Sum queries, keys and values into the first split; queries and keys normed over their whole row."""
        key_at, value_at = self._columns(attention)
        parts: list[tuple[int, int, Norm | None]] = [
            (0, key_at, attention.q_norm),
            (key_at, value_at - key_at, attention.k_norm),
            (value_at, linear.width - value_at, None),
        ]

        def run(shape: StepShape) -> None:
            splits = linear.splits(shape.tokens)
            partials = self._space.partials(splits, shape.tokens, linear.width)
            for first, width, norm in parts:
                cut = whole_row(width)
                bias = self._weights.vector(norm.bias) if norm and norm.bias else self._none
                normalize_product[(shape.tokens,)](
                    partials, partials.stride(0), partials.stride(1),
                    self._none if linear.bias is None else linear.bias, first,
                    self._weights.norm_weight(norm) if norm else self._none, bias, float(norm.eps) if norm else 0.0,
                    width, SPLITS=splits, PRODUCT_BIAS=linear.bias is not None,
                    NORM=_NORM_KINDS[norm.kind] if norm else 0, NORM_BIAS=bool(norm and norm.bias), BLOCK=cut.block,
                    num_warps=cut.warps, **self._space.launching(shape.tokens),
                )  # fmt: skip

        return run

    def _rotate(self, operation: Rotate, linear: MergedLinear, summed: bool) -> Callable[[StepShape], None]:
        attention, space = operation.attention, self._space
        cache, arrays = self._kv.layers[operation.layer], space.arrays
        slots = arrays.slots(self._kv.group_of(operation.layer))
        rope = attention.rope
        cosine, sine = self._ropes.get(rope)
        key_at, value_at = self._columns(attention)
        q_norm, k_norm = (None, None) if summed else (attention.q_norm, attention.k_norm)
        norm = q_norm or k_norm
        weights = [self._weights.norm_weight(n) if n else self._none for n in (q_norm, k_norm)]
        biases = [self._weights.vector(n.bias) if n and n.bias else self._none for n in (q_norm, k_norm)]
        bias = None if summed else linear.bias
        parts = attention.num_heads + 2 * attention.num_kv_heads

        def run(shape: StepShape) -> None:
            splits = linear.splits(shape.tokens)
            partials = space.partials(splits, shape.tokens, linear.width)
            rotate[(shape.tokens, -(-parts // ROTATE_PARTS))](
                partials, partials.stride(0), partials.stride(1), self._none if bias is None else bias, space.query,
                cache.keys, cache.values, cache.key_scales, cache.value_scales, slots, arrays["positions"], cosine,
                sine, *weights, *biases, float(norm.eps) if norm else 0.0, key_at, value_at, space.query.stride(0),
                SPLITS=1 if summed else splits, BIAS=bias is not None, HEADS=attention.num_heads,
                KV_HEADS=attention.num_kv_heads, HEAD=attention.head_size, PADDED_HEAD=padded_head(attention),
                ROTARY=rope.size if rope else 0, INTERLEAVED=bool(rope and rope.pairing == "interleaved"),
                NORM=_NORM_KINDS[norm.kind] if norm else 0, NORM_BIAS=bool(norm and norm.bias),
                BLOCK_SIZE=self._kv.block_size, INT8=self._kv.dtype == "int8", PARTS=ROTATE_PARTS,
                num_warps=ROTATE_PARTS,
                **space.launching(shape.tokens),
            )  # fmt: skip

        return run

    def _attend(self, operation: Attend) -> Callable[[StepShape], None]:
        attention, space = operation.attention, self._space
        cache, arrays = self._kv.layers[operation.layer], space.arrays
        caches = cache.keys, cache.values, cache.key_scales, cache.value_scales
        scores = float(attention.scale), float(attention.soft_cap or 1.0)
        group = attention.num_heads // attention.num_kv_heads
        tokens = arrays.sizes.tile_tokens
        shared: dict[str, Any] = {
            "TABLE_ROWS": arrays.sizes.rows, "CACHE_GROUP": self._kv.group_of(operation.layer),
            "HEADS": attention.num_heads, "KV_HEADS": attention.num_kv_heads, "HEAD": attention.head_size,
            "PADDED_HEAD": padded_head(attention), "BLOCK_SIZE": self._kv.block_size,
            "WINDOW": attention.window or 0, "SOFT_CAP": attention.soft_cap is not None,
            "INT8": self._kv.dtype == "int8", "COMPUTE": TRITON_TYPES[space.query.dtype], "KEYS": KEYS,
        }  # fmt: skip
        sinks = self._weights.vector(attention.sinks) if attention.sinks else self._none
        tables = arrays["starts"], arrays["contexts"], arrays["tables"], arrays["header"]

        def run(shape: StepShape) -> None:
            if shape.decodes:
                splits = self.splits(attention, shape)
                attend_decode[(shape.decodes, attention.num_kv_heads, splits)](
                    space.query, *caches, space.attention_parts, space.attention_state, arrays["decodes"], *tables,
                    *scores, space.query.stride(0), SHARED=shared_heads(attention), SPLITS=splits, **shared,
                    **space.launching(shape.tokens),
                )  # fmt: skip
            if shape.tiles:
                attend_chunk[(shape.tiles, attention.num_kv_heads)](
                    space.query, *caches, sinks, space.attended, arrays["tile_rows"], arrays["tile_firsts"],
                    arrays["starts"], arrays["counts"], *tables[1:], *scores, space.query.stride(0),
                    space.attended.stride(0), SINKS=attention.sinks is not None,
                    QUERIES=max(16, triton.next_power_of_2(tokens * group)), TOKENS=tokens, **shared,
                    num_warps=4 if space.query.dtype == torch.float32 else 8, **space.launching(shape.tokens),
                )  # fmt: skip

        return run

    def _join(self, attention: Attention, reader: MergedLinear) -> Callable[[StepShape], None]:
        """Join the parts of decodes and write what the output projection reads; with chunks, by way of float32."""
        space, width = self._space, attention.num_heads * attention.head_size
        sinks = self._weights.vector(attention.sinks) if attention.sinks else self._none
        arrays, cut = space.arrays, row_in_blocks(width)
        described = arrays["decodes"], arrays["starts"], arrays["contexts"]
        float_rows = {"FORMAT": 0, "BLOCK_ROWS": 1, "CHUNKS": 1}

        def start_combine(shape: StepShape, pointers: tuple[Any, ...], constants: dict[str, Any]) -> None:
            combine[(shape.decodes, cut.blocks)](
                space.attention_parts, space.attention_state, *described, sinks, width, *pointers, *space.row_state,
                SPLITS=self.splits(attention, shape), HEADS=attention.num_heads, HEAD=attention.head_size,
                SINKS=attention.sinks is not None, WINDOW=attention.window or 0, KEYS=KEYS, BLOCK=cut.block,
                num_warps=cut.warps, **constants, **space.launching(shape.tokens),
            )  # fmt: skip

        def run(shape: StepShape) -> None:
            if shape.decodes and shape.tiles:
                floats = space.attended, space.attended.stride(0), self._none, self._none, self._none
                start_combine(shape, floats, float_rows)
            for form in reader.forms(shape.tokens):
                target = space.activations.get(form, width)
                if not shape.tiles:
                    start_combine(shape, target.pointers(), target.constants())
                    continue
                convert[(shape.tokens, cut.blocks)](
                    space.attended, space.attended.stride(0), width, *target.pointers(), *space.row_state,
                    BLOCK=cut.block, num_warps=cut.warps, **target.constants(), **space.launching(shape.tokens),
                )  # fmt: skip

        return run
