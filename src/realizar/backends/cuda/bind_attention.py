"""Rope and attention bound to kernels and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from realizar.backends.cuda.activations import CHUNK, ActivationBuffer, Form
from realizar.backends.cuda.decode_attention import DecodeAttention
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernel_sizes import (
    KEYS,
    ROTATE_PARTS,
    TRITON_TYPES,
    decode_parts,
    padded_head,
    row_in_blocks,
    shared_heads,
    whole_row,
)
from realizar.backends.cuda.kernels.activate import convert
from realizar.backends.cuda.kernels.attend import attend_chunk
from realizar.backends.cuda.kernels.attend_decode import attend_decode
from realizar.backends.cuda.kernels.normalize import normalize_product
from realizar.backends.cuda.kernels.rotate import rotate
from realizar.backends.cuda.kv_memory import KVMemory
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.linears import MergedLinear
from realizar.backends.cuda.native.attend_source import AttendKernel
from realizar.backends.cuda.rope_tables import RopeTables
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.weights import Weights
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import Attend, Rotate
from realizar.models.spec import Attention, Norm

_NORM_KINDS = {"rms": 1, "layer": 2}
_SHORT = 2048  # tokens of a context that is not cut into more parts than pay
_FLOAT_ROWS = {"FORMAT": 0, "BLOCK_ROWS": 1, "CHUNKS": 1}


@dataclass(frozen=True, slots=True)
class BoundDecode:
    """Attention of single tokens in one layer: `linear` made queries, keys and values, `reader` takes the result."""

    operation: Attend
    rotation: Rotate
    linear: MergedLinear
    reader: MergedLinear


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
        self._native = DecodeAttention(device.torch_device) if device.has_cuda_kernels else None
        self._bound: list[BoundDecode] = []

    def prepare(self, shapes: Iterable[StepShape]) -> None:
        """Compile the CUDA kernels that decodes of these steps need."""
        if self._native is not None:
            steps = [shape for shape in shapes if shape.decodes]
            self._native.prepare(self._kernel(decode, shape) for decode in self._bound for shape in steps)

    def bind_rotate(self, operation: Rotate, linear: MergedLinear) -> Iterator[Launch]:
        by_row = operation.attention.qk_norm_axis == "row"
        if by_row:
            yield Launch("row norm", self._norm_rows(operation.attention, linear))
        yield Launch("rope", self._rotate(operation, linear))

    def bind_attend(
        self, operation: Attend, rotation: Rotate, linear: MergedLinear, reader: MergedLinear
    ) -> Iterator[Launch]:
        """`linear` made queries, keys and values, which `rotation` turns; `reader` takes the result."""
        decode = BoundDecode(operation, rotation, linear, reader)
        self._bound.append(decode)
        yield Launch("attention", self._attend(decode), attention=operation.attention)
        yield Launch("join", self._convert(operation.attention, reader))

    def parts(self, attention: Attention, shape: StepShape) -> int:
        """Of every decode's context."""
        return decode_parts(attention, shape.decodes, self._context, self._device, self._fixed)

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

    def _turned(self, operation: Rotate, linear: MergedLinear, shape: StepShape) -> tuple[list[Any], dict[str, Any]]:
        """What `turned_heads` takes: all arguments up to `value_at`, and its constants."""
        attention, rope = operation.attention, operation.attention.rope
        summed = attention.qk_norm_axis == "row"
        norms = (None, None) if summed else (attention.q_norm, attention.k_norm)
        norm = norms[0] or norms[1]
        weights = [self._weights.norm_weight(n) if n else self._none for n in norms]
        biases = [self._weights.vector(n.bias) if n and n.bias else self._none for n in norms]
        bias = None if summed else linear.bias
        splits = linear.splits(shape.tokens)
        partials = self._space.partials(splits, shape.tokens, linear.width)
        pointers = [
            partials, partials.stride(0), partials.stride(1), self._none if bias is None else bias,
            self._space.arrays["positions"], *self._ropes.get(rope), *weights, *biases,
            float(norm.eps) if norm else 0.0, *self._columns(attention),
        ]  # fmt: skip
        constants = {
            "SPLITS": 1 if summed else splits, "BIAS": bias is not None, "HEADS": attention.num_heads,
            "KV_HEADS": attention.num_kv_heads, "HEAD": attention.head_size, "PADDED_HEAD": padded_head(attention),
            "ROTARY": rope.size if rope else 0, "INTERLEAVED": bool(rope and rope.pairing == "interleaved"),
            "NORM": _NORM_KINDS[norm.kind] if norm else 0, "NORM_BIAS": bool(norm and norm.bias),
            "BLOCK_SIZE": self._kv.block_size,
        }  # fmt: skip
        return pointers, constants

    def _cache(self, layer: int) -> tuple[torch.Tensor, ...]:
        """A layer's keys, values and their scales."""
        cache = self._kv.layers[layer]
        return cache.keys, cache.values, cache.key_scales, cache.value_scales

    def _rotate(self, operation: Rotate, linear: MergedLinear) -> Callable[[StepShape], None]:
        """Of steps with chunks: `attend_decode` does without."""
        attention, space = operation.attention, self._space
        slots = space.arrays.slots(self._kv.group_of(operation.layer))
        caches, parts = self._cache(operation.layer), attention.num_heads + 2 * attention.num_kv_heads

        def run(shape: StepShape) -> None:
            if not shape.tiles:
                return
            pointers, constants = self._turned(operation, linear, shape)
            rotate[(shape.tokens, -(-parts // ROTATE_PARTS))](
                *pointers, *caches, slots, space.query, space.query.stride(0), INT8=self._kv.dtype == "int8",
                PARTS=ROTATE_PARTS, num_warps=ROTATE_PARTS, **constants, **space.launching(shape.tokens),
            )  # fmt: skip

        return run

    def _attend(self, decode: BoundDecode) -> Callable[[StepShape], None]:
        def run(shape: StepShape) -> None:
            if shape.decodes:
                if self._native is not None and self._native.ready(self._kernel(decode, shape)):
                    self._start_native(self._native, decode, shape)
                else:
                    self._start_decodes(decode, shape)
            if shape.tiles:
                self._attend_tiles(decode.operation, shape)

        return run

    def _shared(self, operation: Attend) -> dict[str, Any]:
        """Constants of both kernels of attention."""
        attention, arrays = operation.attention, self._space.arrays
        return {
            "TABLE_ROWS": arrays.sizes.rows, "CACHE_GROUP": self._kv.group_of(operation.layer),
            "WINDOW": attention.window or 0, "SOFT_CAP": attention.soft_cap is not None,
            "SINKS": attention.sinks is not None, "COMPUTE": TRITON_TYPES[self._space.query.dtype], "KEYS": KEYS,
        }  # fmt: skip

    def _kernel(self, decode: BoundDecode, shape: StepShape) -> AttendKernel:
        """The CUDA kernel for the decodes of a step."""
        attention, rope = decode.operation.attention, decode.operation.attention.rope
        summed = attention.qk_norm_axis == "row"
        norm = None if summed else attention.q_norm or attention.k_norm
        target = self._direct(attention, decode.reader, shape)
        form = target.form if target is not None and target.form.kind in ("int8", "half") else Form("f32")
        kernel = AttendKernel(
            head=attention.head_size, group=attention.num_heads // attention.num_kv_heads,
            splits=1 if summed else decode.linear.splits(shape.tokens),
            bias=not summed and decode.linear.bias is not None, norm=_NORM_KINDS[norm.kind] if norm else 0,
            norm_bias=bool(norm and norm.bias), rotary=rope.size if rope else 0,
            interleaved=bool(rope and rope.pairing == "interleaved"), element=self._kv.dtype,
            block_size=self._kv.block_size, out=form.kind, block_rows=form.block_rows,
        )  # fmt: skip
        warps, resident = self._warps(kernel, shape, attention)
        return replace(kernel, warps=warps, resident=resident, least=2 if self._fixed or shape.long else 4)

    def _warps(self, kernel: AttendKernel, shape: StepShape, attention: Attention) -> tuple[int, int]:
        """Of a block and of a multiprocessor: few blocks shall end soon, many shall fit at once."""
        blocks, processors = shape.decodes * attention.num_kv_heads, self._device.processors
        if self._fixed or shape.long:
            return 4, 12
        if self._are_few(shape.decodes, attention) and replace(kernel, warps=8).supported:
            return 8, 8
        return (4, 12) if blocks <= processors else (4, 16) if blocks <= 4 * processors else (2, 16)

    def _are_few(self, decodes: int, attention: Attention) -> bool:
        return 2 * decodes * attention.num_kv_heads <= self._device.processors

    def is_long(self, decodes: int, context: int) -> bool:
        """Whether a step with so many decodes, the longest of which has this context, is `StepShape.long`."""
        if self._native is None or self._fixed or context <= _SHORT:
            return False
        return any(self._are_few(decodes, decode.operation.attention) for decode in self._bound)

    def _start_native(self, native: DecodeAttention, decode: BoundDecode, shape: StepShape) -> None:
        attention, space, layer = decode.operation.attention, self._space, decode.operation.layer
        arrays, kernel = space.arrays, self._kernel(decode, shape)
        target = self._direct(attention, decode.reader, shape)
        if target is None:
            written, stride = [space.attended, None, None], space.attended.stride(0)
        else:
            values = target.codes if kernel.out == "int8" else target.values
            written, stride = [values, target.scales, target.terms], target.cols
        (
            (partials, *strides, bias, positions, cosine, sine, q_norm, k_norm, q_bias, k_bias, eps, key_at, value_at),
            _,
        ) = self._turned(decode.rotation, decode.linear, shape)
        tensors = [
            partials, bias, positions, cosine, sine, q_norm, k_norm, q_bias, k_bias, *self._cache(layer),
            arrays.slots(self._kv.group_of(layer)), self._sinks(attention) if attention.sinks else None,
            space.attention_parts, space.attention_state, space.arrivals, arrays["decodes"], arrays["starts"],
            arrays["contexts"], arrays["tables"], arrays["header"], *written,
        ]  # fmt: skip
        numbers = [eps, float(attention.scale), float(attention.soft_cap or 0.0)]
        integers = [
            *strides, key_at, value_at, attention.num_kv_heads, attention.window or 0,
            self._kv.group_of(layer) * arrays.sizes.rows, stride,
        ]  # fmt: skip
        blocks = shape.decodes * attention.num_kv_heads
        room = kernel.resident // kernel.warps * self._device.processors
        parts = self.parts(attention, shape)
        grid = shape.decodes, attention.num_kv_heads, parts if self._fixed else max(1, min(parts, room // blocks))
        native.launch(kernel, grid, tensors, numbers, integers, space.launching(shape.tokens)["DEPENDENT"])

    def _start_decodes(self, decode: BoundDecode, shape: StepShape) -> None:
        attention, space = decode.operation.attention, self._space
        arrays, parts = space.arrays, self.parts(attention, shape)
        target = self._direct(attention, decode.reader, shape)
        if target is None:
            written, form = (space.attended, space.attended.stride(0), *[self._none] * 3), _FLOAT_ROWS
        else:
            written, form = target.pointers(), target.constants()
        pointers, constants = self._turned(decode.rotation, decode.linear, shape)
        group, layer = attention.num_heads // attention.num_kv_heads, decode.operation.layer
        attend_decode[(shape.decodes, attention.num_kv_heads, parts)](
            *pointers, *self._cache(layer), arrays.slots(self._kv.group_of(layer)),
            self._sinks(attention), space.attention_parts, space.attention_state, space.arrivals, arrays["decodes"],
            arrays["starts"], arrays["contexts"], arrays["tables"], arrays["header"], float(attention.scale),
            float(attention.soft_cap or 1.0), *written, INT8_CACHE=self._kv.dtype == "int8",
            SHARED=shared_heads(attention), PARTS=parts, JOINED=triton.next_power_of_2(group) * padded_head(attention),
            **constants, **self._shared(decode.operation), **form, **space.launching(shape.tokens),
        )  # fmt: skip

    def _attend_tiles(self, operation: Attend, shape: StepShape) -> None:
        attention, space = operation.attention, self._space
        arrays, tokens = space.arrays, space.arrays.sizes.tile_tokens
        group = attention.num_heads // attention.num_kv_heads
        attend_chunk[(shape.tiles, attention.num_kv_heads)](
            space.query, *self._cache(operation.layer), self._sinks(attention), space.attended, arrays["tile_rows"],
            arrays["tile_firsts"], arrays["starts"], arrays["counts"], arrays["contexts"], arrays["tables"],
            arrays["header"], float(attention.scale), float(attention.soft_cap or 1.0), space.query.stride(0),
            space.attended.stride(0), HEADS=attention.num_heads, KV_HEADS=attention.num_kv_heads,
            HEAD=attention.head_size, PADDED_HEAD=padded_head(attention), BLOCK_SIZE=self._kv.block_size,
            INT8=self._kv.dtype == "int8", QUERIES=max(16, triton.next_power_of_2(tokens * group)), TOKENS=tokens,
            num_warps=4 if space.query.dtype == torch.float32 else 8, **self._shared(operation),
            **space.launching(shape.tokens),
        )  # fmt: skip

    def _sinks(self, attention: Attention) -> torch.Tensor:
        return self._weights.vector(attention.sinks) if attention.sinks else self._none

    def _direct(self, attention: Attention, reader: MergedLinear, shape: StepShape) -> ActivationBuffer | None:
        """Where `attend_decode` writes what the output projection reads; None where it must be converted."""
        forms, width = reader.forms(shape.tokens), attention.num_heads * attention.head_size
        group = width // attention.num_kv_heads
        own = forms[0].kind in ("int8", "half")
        whole = attention.head_size == padded_head(attention) and group % CHUNK == 0
        if shape.tiles or len(forms) > 1 or not (whole if own else forms[0].kind == "f32"):
            return None
        return self._space.activations.get(forms[0], width)

    def _convert(self, attention: Attention, reader: MergedLinear) -> Callable[[StepShape], None]:
        """What attention left as float32, for the output projection."""
        space, width = self._space, attention.num_heads * attention.head_size

        def run(shape: StepShape) -> None:
            if self._direct(attention, reader, shape) is not None:
                return
            for form in reader.forms(shape.tokens):
                target = space.activations.get(form, width)
                cut = whole_row(width) if form.kind == "fp8" else row_in_blocks(width)
                convert[(shape.tokens, cut.blocks)](
                    space.attended, space.attended.stride(0), width, *target.pointers(), *space.row_state,
                    BLOCK=cut.block, num_warps=cut.warps, **target.constants(), **space.launching(shape.tokens),
                )  # fmt: skip

        return run
