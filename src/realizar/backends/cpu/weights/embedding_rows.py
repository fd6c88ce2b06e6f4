"""Rows of the embedding as float32, straight from the file's blocks: a step starts with them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, types, void
from numba.extending import intrinsic
from numpy.typing import NDArray

from realizar.backends.cpu.codegen.emit import F16, F32, I8, I16, I32, Value
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.records import address
from realizar.backends.cpu.weights.formats import GROUP, packed_format
from realizar.backends.cpu.weights.repack_fields import Fields
from realizar.backends.cpu.weights.repack_readers import READERS
from realizar.quantization import MatrixSource, WeightLayout
from realizar.quantization.layout import FloatType

_FLOAT_BYTES: dict[FloatType, int] = {"f32": 4, "f16": 2, "bf16": 2}
COMPILED: tuple[FloatType | WeightLayout, ...] = (
    *_FLOAT_BYTES,
    *(layout for layout in READERS if layout.codebook is None),
)
"""Numbers and layouts that have a kernel here. Codebooks, which embeddings hardly ever have, go through numpy."""
_WIDE = ir.VectorType(F32, GROUP)
_SIGNATURE = void(int64, int64, types.Array(int32, 1, "C"), types.Array(float32, 2, "A"), float32)


class EmbeddingRows:
    """Reads out_features of a matrix where it lies."""

    def __init__(self, source: MatrixSource) -> None:
        kind = source.layout.float_type or source.layout
        self._source, self._raw = source, source.raw
        compiled = self._raw is not None and kind in COMPILED and source.in_features % GROUP == 0
        self._read = make_read_rows(COMPILED.index(kind)) if compiled else None

    def read(self, ids: NDArray[np.int32], scale: float, out: NDArray[np.float32]) -> None:
        """out [len(ids), in_features] = out_features `ids`, the same bits as dequantised times float32 `scale`."""
        if self._read is not None and self._raw is not None:
            self._read(address(self._raw), self._raw.strides[0], np.ascontiguousarray(ids), out, scale)
            return
        np.multiply(self._source.gather(ids), np.float32(scale), out=out)


@cache
def make_read_rows(kind: int) -> Any:
    """The reader of COMPILED[kind]: address of row 0, bytes of a row, ids, out [ids, cols], scale."""
    layout = COMPILED[kind]
    if isinstance(layout, WeightLayout):
        block_bytes, cols = layout.block_bytes, layout.block_size
    else:
        block_bytes, cols = _FLOAT_BYTES[layout] * GROUP, GROUP

    @njit(_SIGNATURE, nogil=True, cache=is_kept())
    def read_rows(source: int, row_bytes: int, ids: Any, out: Any, scale: float) -> None:
        for token in range(ids.shape[0]):
            at = source + np.int64(ids[token]) * row_bytes
            to = out.ctypes.data + token * out.strides[0]
            for block in range(out.shape[1] // cols):
                dequantize_block(kind, at + block * block_bytes, to + block * cols * 4, scale)

    return read_rows


@intrinsic(prefer_literal=True)
def dequantize_block(typing_context: Any, kind: Any, source: Any, out: Any, scale: Any) -> Any:
    """Write one block's columns, times `scale`, as float32."""
    if not isinstance(kind, types.IntegerLiteral):
        return None
    layout = COMPILED[kind.literal_value]

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Fields(builder, arguments[1])
        factor = _spread(e, [arguments[3]])
        groups = _dequantize(e, layout) if isinstance(layout, WeightLayout) else [_load_floats(e, layout)]
        for index, values in enumerate(groups):
            e.store(builder.fmul(values, factor), e.at(arguments[2], index * GROUP * 4), 4)
        return context.get_dummy_value()

    return void(kind, int64, int64, float32), codegen


def _load_floats(e: Fields, kind: FloatType) -> Value:
    if kind == "f32":
        return e.load(e.block, _WIDE)
    if kind == "f16":
        return e.b.fpext(e.load(e.block, ir.VectorType(F16, GROUP)), _WIDE)
    wide = ir.VectorType(I32, GROUP)
    bits = e.b.zext(e.load(e.block, ir.VectorType(I16, GROUP)), wide)
    return e.b.bitcast(e.b.shl(bits, ir.Constant(wide, [16] * GROUP)), _WIDE)


def _dequantize(e: Fields, layout: WeightLayout) -> list[Value]:
    """float32 [32] per group: scale * (code - offset) + minimum, each step rounded."""
    weight_format, reader = packed_format(layout), READERS[layout]
    nibbles = 2 if weight_format.small == "u4" else 1  # that share a stored value
    small = [_small(e, weight_format.small, value, plane) for value in reader.small(e) for plane in range(nibbles)]
    supers = [_half(e, value) for value in reader.supers(e)]
    parts = GROUP // weight_format.group
    result = []
    for group in range(layout.block_size // GROUP):
        if weight_format.centred:
            planes = [[e.b.fadd(supers[0], supers[0])], [e.b.fneg(supers[0])]]
        elif weight_format.small == "none":
            planes = [supers]
        else:
            first = group * parts * weight_format.planes
            planes = [
                [small[first + part * weight_format.planes + plane] for part in range(parts)]
                for plane in range(weight_format.planes)
            ]
            if supers:
                planes = [[e.b.fmul(value, supers[i]) for value in plane] for i, plane in enumerate(planes)]
        wide = ir.VectorType(I32, GROUP)
        codes = e.b.zext(e.b.bitcast(reader.words(e, group), e.bytes), wide)
        integers = e.b.sitofp(e.b.sub(codes, ir.Constant(wide, [weight_format.offset] * GROUP)), _WIDE)
        values = e.b.fmul(integers, _spread(e, planes[0]))
        result.append(values if len(planes) == 1 else e.b.fadd(values, _spread(e, planes[1])))
    return result


def _small(e: Fields, kind: str, value: Value, plane: int) -> Value:
    """A small scale as a float32 scalar."""
    if kind == "f16":
        return _half(e, value)
    if kind == "i8":
        return e.b.sitofp(value, F32)
    if kind == "u4":
        value = e.b.lshr(value, ir.Constant(I8, 4)) if plane else e.b.and_(value, ir.Constant(I8, 15))
    return e.b.uitofp(value, F32)


def _half(e: Fields, bits: Value) -> Value:
    return e.b.fpext(e.b.bitcast(bits, F16), F32)


def _spread(e: Fields, scalars: list[Value]) -> Value:
    """float32 [32]: each scalar over its equal share of columns."""
    vector = ir.Constant(_WIDE, ir.Undefined)
    for index, scalar in enumerate(scalars):
        vector = e.b.insert_element(vector, scalar, ir.Constant(I32, index))
    return e.pick(vector, vector, [column * len(scalars) // GROUP for column in range(GROUP)])
