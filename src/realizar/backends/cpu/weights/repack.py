"""Raw blocks to tiles, compiled: one small function per layout that moves whole 32-bit words of codes."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, types
from numba.extending import intrinsic

from realizar.backends.cpu.codegen.emit import Value
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.weights.formats import (
    GROUP,
    KEPT_LAYOUTS,
    PLANES,
    SMALL_BYTES,
    WeightFormat,
    packed_format,
)
from realizar.backends.cpu.weights.repack_fields import WORDS, Fields
from realizar.backends.cpu.weights.repack_readers import READERS

REPACKED = (*READERS, *KEPT_LAYOUTS)
"""Layouts whose raw blocks are repacked. Kernels take the position here as a compile-time constant."""
_SIGNATURE = types.void(*[types.int64] * 9)


@intrinsic(prefer_literal=True)
def repack_block(
    typing_context: Any, kind: Any, lanes: Any, source: Any, codes: Any, scales: Any, supers: Any
) -> Any:  # fmt: skip
    """Move one block of layout number `kind` of REPACKED to its lane. Addresses, the lane's offset included."""
    if not isinstance(kind, types.IntegerLiteral) or not isinstance(lanes, types.IntegerLiteral):
        return None
    layout, count = REPACKED[kind.literal_value], lanes.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, codes, scales, supers = arguments[2:]
        e = Fields(builder, source)
        weight_format = packed_format(layout)
        if weight_format.kept is not None:
            for index in range(layout.block_bytes // 2):
                e.store(e.half_word(2 * index), e.at(codes, index * count * 2), 2)
            return context.get_dummy_value()
        reader = READERS[layout]
        for group in range(layout.block_size // GROUP):
            _store_codes(
                e,
                weight_format,
                reader.words(e, group),
                e.at(codes, weight_format.codes_bytes(count, GROUP * group)),
                count,
            )
        for index, value in enumerate(reader.small(e)):
            e.store(value, e.at(scales, index * count * SMALL_BYTES[weight_format.small]), 1)
        for index, value in enumerate(reader.supers(e)):  # one per block
            e.store(value, e.at(supers, index * count * 2), 2)
        return context.get_dummy_value()

    return types.void(kind, lanes, *[types.int64] * 4), codegen


def _store_codes(e: Fields, weight_format: WeightFormat, words: Value, target: Value, lanes: int) -> None:
    """Split a group's eight words into planes of bits: the layout stands in `formats`."""
    vector, shift = 0, 0
    for bits in PLANES[weight_format.bits]:
        plane = e.field(words, shift, bits) if bits < 8 else words
        plane = e.b.shl(plane, e.lanes_of([bits * (word // bits) for word in range(WORDS)]))
        count = WORDS
        while count > bits:
            count //= 2
            lower, upper = (e.pick(plane, plane, range(start, start + count)) for start in (0, count))
            plane = e.b.or_(lower, upper)
        for index, value in enumerate(e.elements(plane)):
            e.store(value, e.at(target, (vector + index) * 4 * lanes), 4)
        vector, shift = vector + bits, shift + bits


@cache
def make_repack(kind: int, lanes: int) -> Any:
    """The repacker of layout REPACKED[kind]. Its arguments: source, row bytes, codes, scales, supers, out_features,
    blocks of each, first tile, last tile + 1.

    Addresses are those of the whole matrix, `source` that of the first tile's first out_feature; those of the source
    lie `row bytes` apart. Lanes beyond the last out_feature are left as they are.
    """
    layout = REPACKED[kind]
    weight_format, block_bytes, cols = packed_format(layout), layout.block_bytes, layout.block_size
    codes_bytes, scales_bytes = weight_format.codes_bytes(lanes, cols), weight_format.scales_bytes(lanes, cols)
    supers_bytes, small_bytes = weight_format.supers_bytes(lanes, cols), SMALL_BYTES[weight_format.small]
    code_bytes = 4 if weight_format.kept is None else 2

    @njit(_SIGNATURE, nogil=True, cache=is_kept())
    def repack(
        source: int,
        row_bytes: int,
        codes: int,
        scales: int,
        supers: int,
        out_features: int,
        blocks: int,
        first: int,
        stop: int,
    ) -> None:
        for tile in range(first, stop):
            for lane in range(min(lanes, out_features - tile * lanes)):
                at = source + ((tile - first) * lanes + lane) * row_bytes
                for block in range(blocks):
                    index = tile * blocks + block
                    repack_block(
                        kind, lanes, at + block * block_bytes, codes + index * codes_bytes + lane * code_bytes,
                        scales + index * scales_bytes + lane * small_bytes, supers + index * supers_bytes + lane * 2,
                    )  # fmt: skip

    return repack
