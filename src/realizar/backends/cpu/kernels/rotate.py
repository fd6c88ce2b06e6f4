"""QK norm per head, rotary embedding, and writing keys and values to their blocks: one pass per token and head."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import literally

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.emit import F16, I8, I16, Emitter
from realizar.backends.cpu.emitted import Value, emitted
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.kernels.normalize import normalize_row
from realizar.backends.cpu.kv.layout import KV_DTYPES
from realizar.backends.cpu.memory import inner, read_f32, read_i64, view
from realizar.backends.cpu.records import Record

# `value_stride` and `second_value` in bytes: where not 0, a value is the sum of two terms so far apart.
# `query_scales`, where not 0: a factor of each token's queries, float32 [tokens]. `value_eps`, where not 0: values are
# divided by their root mean square. Without KV heads nothing is written to the cache.
ROTATE = Record(
    "step query query_stride key key_stride value value_stride num_heads num_kv_heads head_size cosine sine rotary "
    "interleaved query_norm key_norm norm_kind eps=f32 query_norm_bias key_norm_bias slots cache block_bytes "
    "head_bytes plane_bytes scale_bytes key_scale=f32 value_scale=f32 block_size second_value query_scales "
    "value_eps=f32"
)


@emitted
def narrow_group(builder: Any, dtype: int, source: Value, target: Value) -> None:
    """32 float32 at `source` to 32 elements at `target`, rounded to nearest even."""
    name = KV_DTYPES[dtype]
    e = Emitter(builder, GROUP)
    x = e.load(source, e.f32, 4)
    if name == "f32":
        e.store(x, target, 4)
    elif name == "f16":
        e.store(builder.fptrunc(x, ir.VectorType(F16, GROUP)), target, 2)
    elif name == "fp8":
        e.store(e4m3_codes(e, x), target, 1)
    else:
        bits = builder.bitcast(x, e.i32)
        odd = builder.and_(builder.lshr(bits, e.const_i32(16)), e.const_i32(1))
        rounded = builder.add(builder.add(bits, e.const_i32(0x7FFF)), odd)
        e.store(builder.trunc(builder.lshr(rounded, e.const_i32(16)), ir.VectorType(I16, GROUP)), target, 2)


def e4m3_codes(e: Emitter, x: Value) -> Value:
    """The bytes that `Emitter.load_float` reads as the nearest to float32 lanes; what is too large becomes the largest.
    A NaN stays one.

    A byte read so has its bits in the places of a half. Those of the least are multiples of 2^-17, and so are the
    numbers that follow 2^6.
    """
    b, least, base = e.b, 2.0**-14, e.const_f32(2.0**6)
    bits = b.bitcast(x, e.i32)
    size = b.and_(bits, e.const_i32(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, e.const_i32(20)), e.const_i32(1))
    rounded = b.lshr(b.add(b.add(size, e.const_i32(0x7FFFF)), odd), e.const_i32(20))
    magnitude = b.bitcast(size, e.f32)
    steps = b.sub(b.bitcast(b.fadd(magnitude, base), e.i32), b.bitcast(base, e.i32))
    tiny = b.fcmp_ordered("<", magnitude, e.const_f32(least))
    code = b.select(tiny, steps, b.sub(rounded, e.const_i32((127 - 15) << 3)))
    most = e.const_i32(0x7E)
    code = b.select(b.icmp_signed("<", code, most), code, most)
    code = b.select(b.fcmp_unordered("uno", x, x), e.const_i32(0x7F), code)
    sign = b.and_(b.lshr(bits, e.const_i32(24)), e.const_i32(0x80))
    return b.trunc(b.or_(code, sign), ir.VectorType(I8, e.lanes))


@inner
def rotate_head(x: Any, cosine: Any, sine: Any, interleaved: int) -> None:
    """Rotate the first 2 * cosine.size dimensions of one head in place."""
    half = cosine.size
    for i in range(half):
        if interleaved:
            first, second = 2 * i, 2 * i + 1
        else:
            first, second = i, i + half
        a, b = x[first], x[second]
        x[first] = a * cosine[i] - b * sine[i]
        x[second] = b * cosine[i] + a * sine[i]


@inner
def scale_head(x: Any, factor: float) -> None:
    for i in range(x.size):
        x[i] *= factor


@inner
def take_value(arguments: Any, token: int, head: int, size: int) -> Any:
    """A token's value of one head: its terms summed, and normed where values are."""
    at = arguments.value + token * arguments.value_stride + head * size * 4
    value, second = view(at, size, np.float32), arguments.second_value
    if second != 0:
        rest = view(at + second, size, np.float32)
        for i in range(size):
            value[i] += rest[i]
    eps = arguments.value_eps
    if eps > 0:
        squares = np.float32(0.0)
        for i in range(size):
            squares += value[i] * value[i]
        scale_head(value, np.float32(1.0) / np.sqrt(squares / np.float32(size) + eps))
    return value


@inner
def quantize_kv(x: Any, first: int, codes: Any) -> float:
    """int8 codes of 32 dimensions (fewer at the end of a head) and their scale, which is NaN if one of them is."""
    count = min(GROUP, x.size - first)
    largest, broken = np.float32(0.0), np.float32(0.0)
    for i in range(count):
        largest = max(largest, abs(x[first + i]))
        broken += x[first + i] * np.float32(0.0)
    inverse = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
    for i in range(GROUP):
        codes[i] = np.int8(np.rint(x[first + i] * inverse)) if i < count else np.int8(0)
    return largest / np.float32(127.0) + broken


@inner
def write_codes(
    x: Any, value: Any, keys: int, place: int, block_size: int, padded: int, plane: int, scale_bytes: int, codes: Any
) -> None:
    """One key and value as int8 with a scale per 32 dimensions: keys by dimension, values by token."""
    groups = padded // GROUP
    key_out, value_out = view(keys, padded * block_size, np.int8), view(keys + plane, padded * block_size, np.int8)
    key_scales = view(keys + 2 * plane, groups * block_size, np.float32)
    value_scales = view(keys + 2 * plane + scale_bytes, groups * block_size, np.float32)
    for group in range(groups):
        key_scales[group * block_size + place] = quantize_kv(x, group * GROUP, codes)
        for i in range(GROUP):
            key_out[(group * GROUP + i) * block_size + place] = codes[i]
        value_scales[place * groups + group] = quantize_kv(value, group * GROUP, codes)
        for i in range(GROUP):
            value_out[place * padded + group * GROUP + i] = codes[i]


@inner
def write_elements(
    dtype: int, x: Any, value: Any, keys: int, place: int, block_size: int, plane: int, row: Any, narrow: Any
) -> None:
    """One key and value as floats, laid out as codes are. `row` (a padded head) and `narrow` are room to work in."""
    _ = literally(dtype)
    elements = view(keys, row.size * block_size, narrow.dtype)
    for i in range(x.size):
        row[i] = x[i]
    for group in range(row.size // GROUP):
        narrow_group(dtype, row.ctypes.data + group * GROUP * 4, narrow.ctypes.data)
        for i in range(GROUP):
            elements[(group * GROUP + i) * block_size + place] = narrow[i]
    for i in range(x.size):
        row[i] = value[i]
    for group in range(row.size // GROUP):
        target = keys + plane + (place * row.size + group * GROUP) * narrow.itemsize
        narrow_group(dtype, row.ctypes.data + group * GROUP * 4, target)


def make_rotate(dtype: int) -> Kernel:
    """The kernel for one KV element type. Units are (token, head), KV heads last."""
    name = KV_DTYPES[dtype]
    int8, scaled, element = name == "int8", name == "fp8", {"f32": np.float32, "fp8": np.uint8}.get(name, np.uint16)

    @kernel(dtype)
    def rotate(address: int, thread: int, threads: int) -> None:
        arguments = ROTATE(address)
        tokens = read_i64(arguments.step, 0)
        heads, kv_heads = arguments.num_heads, arguments.num_kv_heads
        size, half, interleaved = arguments.head_size, arguments.rotary // 2, arguments.interleaved
        kind, eps = arguments.norm_kind, arguments.eps
        block_size, plane = arguments.block_size, arguments.plane_bytes
        query_scales = arguments.query_scales
        slots = view(arguments.slots, max(tokens, 1), np.int32)
        padded = (size + GROUP - 1) // GROUP * GROUP
        padded_row = np.zeros(padded, np.float32)
        narrow = np.zeros(GROUP, element)
        codes = np.zeros(GROUP, np.int8)
        per_token = heads + kv_heads
        units = tokens * per_token
        for unit in range(units * thread // threads, units * (thread + 1) // threads):
            token, head = unit // per_token, unit % per_token
            cosine = view(arguments.cosine + token * half * 4, half, np.float32)
            sine = view(arguments.sine + token * half * 4, half, np.float32)
            if head < heads:
                at = arguments.query + token * arguments.query_stride + head * size * 4
                norm, bias = arguments.query_norm, arguments.query_norm_bias
            else:
                at = arguments.key + token * arguments.key_stride + (head - heads) * size * 4
                norm, bias = arguments.key_norm, arguments.key_norm_bias
            x = view(at, size, np.float32)
            if norm != 0:
                normalize_row(x, x, kind, eps, view(norm, size, np.float32), view(bias, size, np.float32), bias != 0)
            rotate_head(x, cosine, sine, interleaved)
            if head < heads:
                if query_scales != 0:
                    scale_head(x, read_f32(query_scales, token))
                continue
            head -= heads
            slot = slots[token]
            keys = arguments.cache + slot // block_size * arguments.block_bytes
            keys += head * arguments.head_bytes
            place = slot % block_size
            value = take_value(arguments, token, head, size)
            if scaled:
                scale_head(x, np.float32(1.0) / arguments.key_scale)
                scale_head(value, np.float32(1.0) / arguments.value_scale)
            if int8:
                write_codes(x, value, keys, place, block_size, padded, plane, arguments.scale_bytes, codes)
            else:
                write_elements(dtype, x, value, keys, place, block_size, plane, padded_row, narrow)

    return rotate
