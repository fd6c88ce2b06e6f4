"""Sources of grouped matmuls and of the sort before them, and their tiles. Standard library only.

A grouped matmul multiplies rows with the matrices of the experts that they go to. `route.cu` sorts pairs of a row and
an expert by expert, each expert's padded to whole tiles; a fixed number of blocks then takes tiles one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias

from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat
from realizar.backends.cuda.native.compiler import Source, read
from realizar.backends.cuda.native.sources import (
    Defines,
    GatedActivation,
    MmaSyncTiles,
    WgmmaTiles,
    define,
    epilogue_defines,
    format_defines,
    format_name,
    of_fields,
)

STEP = 2  # chunks of a stage of the Hopper kernel
_LARGE = 128  # tokens times strips, from which on a Hopper consumer needs the producer's registers
LAID_CHUNKS = 4  # of a block that lays rows in tiles
ROUTE_WARPS = 32
_MOST_COUNTS = 16384  # of all warps, in the sort's shared memory
_STAGED_PLACES = 12288  # at most, there
_ROUTE_WORDS = 24 << 10  # of all of it, on any card
_PAIRS_EACH = 4  # that a lane sorts there
FUSED_PAIRS = 640  # of a step, at the most, whose gate and up and down are one launch


@dataclass(frozen=True, slots=True)
class GroupedTiles:
    """Parameters of a grouped matmul whose weights come through a ring in shared memory.

    Attributes:
        tokens: places of a tile: 8, 16, 32, 64, or with wgmma any multiple of 8 up to 48, or 128.
        strips: strips of 64 output features, of a consumer warpgroup or with mma.sync of the block.
        groups: consumer warpgroups of wgmma.
        stages: of the ring, at least 3. blocks: per multiprocessor.
        laid: rows of gate and up are first laid in tiles by `lay_source`'s kernel; with wgmma.
    """

    kind: Literal["wgmma", "mma_sync"]
    tokens: int
    strips: int
    groups: int
    stages: int
    blocks: int
    laid: bool = False

    @property
    def registers(self) -> int:
        """Registers that a consumer thread takes over from the producer, or 0 where none need to."""
        return 232 if self.is_large and self.groups == 2 else 0

    @property
    def is_large(self) -> bool:
        """True if a Hopper block has a multiprocessor to itself for the sake of its registers."""
        return self.kind == "wgmma" and self.blocks == 1 and self.tokens * self.strips >= _LARGE

    @property
    def threads(self) -> int:
        if self.kind == "mma_sync":
            return self.strips * 128
        return self.groups * 128 + (128 if self.registers else 32)

    @property
    def width(self) -> int:
        return self.strips * (self.groups if self.kind == "wgmma" else 1)

    def items(self, out_features: int) -> int:
        return -(-out_features // (BLOCK * self.width))

    def shared_bytes(self, weight_format: FragmentFormat, gated: bool) -> int:
        """Dynamic shared memory of a block."""
        if self.kind == "mma_sync":
            return self.stages * (
                self.strips * (weight_format.block_bytes + weight_format.super_bytes) + self.tokens * 128
            )
        return self.stages * self.stage_bytes(weight_format) + (self.staged_bytes if gated else 0)

    def stage_bytes(self, weight_format: FragmentFormat) -> int:
        """Bytes of a stage of wgmma's ring."""
        weights = self.width * (STEP * weight_format.block_bytes + weight_format.super_bytes)
        return weights + STEP * self.tokens * 128

    @property
    def staged_bytes(self) -> int:
        """Bytes of a block's outputs of gate and up behind wgmma's ring."""
        return self.groups * 8 * (self.tokens * 16 + 16)

    @property
    def static_bytes(self) -> int:
        """Shared memory of a block beside that, at the most: barriers, pairs and their factors."""
        return 12 * self.tokens * (2 * self.groups if self.kind == "wgmma" else 1) + 16 * self.stages + 16

    def defines(self) -> Defines:
        if self.kind == "mma_sync":
            return MmaSyncTiles(self.tokens, self.strips, self.stages, self.blocks).defines()
        dense = WgmmaTiles(self.tokens, self.strips, self.groups, self.stages, STEP, self.blocks).defines()
        return dense | {"REGISTERS": self.registers}


@dataclass(frozen=True, slots=True)
class DirectTiles:
    """Parameters of a grouped matmul whose warps read weights from memory into registers.

    Attributes:
        tokens: places of a tile: 8 or 16.
        slots: of an item, each two tiles of 16 output features: 1, 2 or 4.
        parts: warps that share a slot's columns.
        ahead: chunks of a warp that are on their way.
        blocks: per multiprocessor.
    """

    tokens: int
    slots: int
    parts: int
    ahead: int
    blocks: int

    kind: Literal["direct"] = "direct"

    @property
    def threads(self) -> int:
        return self.slots * self.parts * 32

    def items(self, out_features: int) -> int:
        return -(-2 * -(-out_features // BLOCK) // self.slots)

    def shared_bytes(self, chunks: int) -> int:
        """Dynamic shared memory of a block: the activations of a tile's places, of so many chunks."""
        return chunks * self.tokens * 128

    @property
    def static_bytes(self) -> int:
        """Shared memory of a block beside that: sums of two items, pairs and their factors."""
        return 2 * self.parts * self.slots * 32 * self.tokens * 4 + 12 * self.tokens + 16

    def defines(self, chunks: int, gated: bool) -> Defines:
        return of_fields(self) | {"CHUNKS": chunks, "GATED": int(gated)}


AnyTiles: TypeAlias = GroupedTiles | DirectTiles


@cache
def grouped_source(
    weight_format: FragmentFormat, tiles: AnyTiles, gathers: bool, activation: GatedActivation | None, chunks: int,
    halves: bool = False,
) -> Source:  # fmt: skip
    """A grouped matmul; its parameters are the fields of `Experts` in work.cu, in order.

    Args:
        gathers: read rows of x by their pairs, in place of rows that lie in tiles.
        activation: of a feed-forward whose gate and up are interleaved; None writes sums to their pairs' rows.
        chunks: of a row of weights. Kernels of wgmma serve all numbers that are odd, or all that are even, those of
            mma.sync all.
        halves: sums leave as halves, divided by 16; of the Hopper kernel without an activation.
    """
    sums = "halves" if halves else "pairs"
    name = f"grouped_{tiles.kind}_{format_name(weight_format)}_{activation or sums}_tokens{tiles.tokens}"
    if isinstance(tiles, DirectTiles):
        own, shared = tiles.defines(chunks, activation is not None), tiles.shared_bytes(chunks)
    else:
        own = tiles.defines() | {"ODD": chunks % 2}
        shared = tiles.shared_bytes(weight_format, activation is not None)
    own |= (
        {"GATHER": int(gathers), "HALVES": int(halves)} | format_defines(weight_format) | epilogue_defines(activation)
    )
    files, items = ["primitives.cu", "mma_sync_instructions.cu"], ""
    if tiles.kind == "wgmma":
        own |= {"LEAST_STAGE": 0, "ARRIVALS": _GATHERING if gathers else 1}
        files, items = ["primitives.cu", *_WGMMA_FILES], read("grouped/wgmma_items.cu")
    text = define(own) + "".join(map(read, files)) + _matmul(tiles.kind, activation) + items
    return Source(name, text + _entry(name, tiles), shared)


def _matmul(kind: str, activation: GatedActivation | None) -> str:
    """The text of a matmul, around which are its constants and those of its weights."""
    files = ["weights.cu", "grouped/work.cu", *(["gated_epilogue.cu"] if activation else [])]
    constants, body = read(f"grouped/{kind}.cu").split(_BODY)
    finish = read(f"grouped/{kind}_{'pairs' if activation is None else 'gated'}.cu")
    return "".join(map(read, files)) + constants + finish + _BODY + body


@dataclass(frozen=True, slots=True)
class FusedTiles:
    """Parameters of gate and up and down in one launch, as of `GroupedTiles`.

    Attributes:
        tokens: places of a tile: 8 or 16.
        strips: of down; of gate and up a warpgroup has one each.
        groups: consumer warpgroups. stages: of the ring, for both. blocks: per multiprocessor.
    """

    tokens: int
    strips: int
    groups: int
    stages: int
    blocks: int

    kind: Literal["wgmma"] = "wgmma"

    @property
    def matrices(self) -> tuple[GroupedTiles, GroupedTiles]:
        """Those of gate and up and of down, in launches of their own."""
        first, last = (
            GroupedTiles("wgmma", self.tokens, strips, self.groups, self.stages, self.blocks)
            for strips in (2, self.strips)
        )
        return first, last

    @property
    def threads(self) -> int:
        return self.matrices[0].threads

    def stage_bytes(self, formats: tuple[FragmentFormat, FragmentFormat]) -> int:
        """Bytes of a stage for weights of gate and up and of down."""
        return max(each.stage_bytes(own) for each, own in zip(self.matrices, formats, strict=True))

    def shared_bytes(self, formats: tuple[FragmentFormat, FragmentFormat]) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * self.stage_bytes(formats) + self.matrices[0].staged_bytes

    def static_bytes(self, experts: int) -> int:
        """Shared memory of a block beside that, at the most: barriers, items, results and the list of tiles."""
        lists = 4 * (experts + FUSED_PAIRS // self.tokens) + 2 * FUSED_PAIRS + 4
        return lists + 2 * 12 * self.tokens * 2 * self.groups + 20 * self.stages + 16


@cache
def fused_source(
    formats: tuple[FragmentFormat, FragmentFormat], tiles: FusedTiles, activation: GatedActivation,
    chunks: tuple[int, int], experts: int,
) -> Source:  # fmt: skip
    """Gate and up, then down, of up to `FUSED_PAIRS` pairs, which it sorts itself, in one launch on Hopper.

    Its parameters: of gate and up and then of down weights, block scales, table, bias, stride, out_features and chunks;
    then rows of x and their scales, memory for the outputs of gate and up, out, weights of the pairs, the choices, the
    count of experts read and `fused_words` integers of zeros; the pairs that share a row of x, rows of its blocks, and
    the number of pairs.

    Args:
        formats: of gate and up, and of down. chunks: of a row of theirs.
        experts: of a layer.
    """
    name = f"grouped_fused_{'_'.join(map(format_name, formats))}_{activation}_tokens{tiles.tokens}"
    warps, stage = 4 * tiles.groups, tiles.stage_bytes(formats)
    both = tiles.matrices[0].defines() | {"PAIRS": FUSED_PAIRS, "ARRIVALS": _GATHERING, "HALVES": 0}
    both |= _sort_defines(experts, warps, -(-FUSED_PAIRS // (32 * warps)))
    del both["STRIPS"]
    parts = [define(both), *map(read, ("primitives.cu", *_WGMMA_FILES, "grouped/sort.cu", "grouped/lists.cu"))]
    matrices = ("gate_up", 2, activation), ("down", tiles.strips, None)
    for (space, strips, end), weight_format, count in zip(matrices, formats, chunks, strict=True):
        own = format_defines(weight_format) | epilogue_defines(end)
        own |= {"STRIPS": strips, "GATHER": int(end is not None), "ODD": count % 2, "LEAST_STAGE": stage}
        parts += [f"namespace {space} {{\n{define(own)}", _matmul("wgmma", end)]
        parts.append("".join(f"#undef {key}\n" for key in (*own, "BYTES_TIMES_16")) + "}\n")
    head = f'extern "C" __global__ void __launch_bounds__({tiles.threads}, {tiles.blocks}) {name}'
    return Source(name, "".join(parts) + read("grouped/fused.cu") + head + _FUSED_ENTRY, tiles.shared_bytes(formats))


_FUSED_ENTRY = """(
    const char* w0, const float* s0, const void* t0, const float* b0, long stride0, int n0, int chunks0,
    const char* w1, const float* s1, const void* t1, const float* b1, long stride1, int n1, int chunks1,
    const char* x, const float* x_scales, char* gated, char* out, const float* pair_weights, const int* chosen,
    u64* experts_read, Progress* progress, int x_share, int x_block, int pairs) {
  const gate_up::Experts first{w0, s0, t0, b0, gated, nullptr, x, x_scales, nullptr, nullptr, stride0, n0, chunks0,
                               x_share, x_block};
  const down::Experts last{w1, s1, t1, b1, out, pair_weights, gated, nullptr, nullptr, nullptr, stride1, n1, chunks1,
                           1, 1};
  multiply_fused(first, last, chosen, pairs, experts_read, progress);
}
"""


def fused_words(experts: int) -> int:
    """int32 of zeros that a fused launch leaves as zeros: `Progress` of fused.cu, with tiles of 8 places."""
    return 2 + experts + FUSED_PAIRS // 8


_WGMMA_FILES = "bulk.cu", "wgmma_instructions.cu", "grouped/ring.cu"
_GATHERING = 33  # arrivals at the barrier of a stage whose rows are gathered: of each lane and of the bytes
_BODY = "// The body.\n"  # of a kernel, between the constants that its end needs and the functions that call it
_POINTERS = (
    "const char* weights", "const float* block_scales", "const void* table", "const float* bias", "char* out",
    "const float* pair_weights", "const char* x", "const float* x_scales", "const int* slots", "const int* work",
)  # fmt: skip
_NUMBERS = "long stride", "int out_features", "int chunks", "int x_share", "int x_block"


def _entry(name: str, tiles: AnyTiles) -> str:
    parameters = (*_POINTERS, *_NUMBERS)
    fields = ", ".join(each.split()[-1] for each in parameters)
    bounds = f"__launch_bounds__({tiles.threads}, {tiles.blocks})"
    head = f'extern "C" __global__ void {bounds} {name}({", ".join(parameters)})'
    return f"{head} {{\n  multiply_experts(Experts{{{fields}}});\n}}\n"


@cache
def lay_source(tokens: int, scales: bool = False) -> Source:
    """The kernel that lays rows of x in tiles of so many places, with `scales` of 8-bit floats."""
    text = define({"TOKENS": tokens, "CHUNKS_EACH": LAID_CHUNKS, "SCALES": int(scales)})
    return Source("lay_rows", text + read("primitives.cu") + read("grouped/lay.cu"))


def route_warps(experts: int) -> int:
    """Warps of a block of the sort: as many as have room for a count of each expert."""
    return max(1, min(ROUTE_WARPS, _MOST_COUNTS // experts))


def block_pairs(experts: int) -> int:
    """Pairs that one block sorts."""
    return route_warps(experts) * 32 * _PAIRS_EACH


def _count_words(experts: int) -> int:
    """Integers of the sort's shared memory beside places: of each warp's counts, of totals and of first tiles."""
    return route_warps(experts) * experts + 2 * experts + 1


def _staged_places(experts: int) -> int:
    """Places of tiles that the sort's shared memory has room for, beside its counts."""
    return max(0, min(_STAGED_PLACES, _ROUTE_WORDS - _count_words(experts))) // 4 * 4


def _sort_defines(experts: int, warps: int, each: int) -> Defines:
    return {"WARPS": warps, "EACH": each, "EXPERTS": experts, "EXPERT_BITS": (experts - 1).bit_length()}


@cache
def route_source(experts: int) -> Source:
    """The sort of up to `block_pairs`, by one block."""
    own: Defines = {**_sort_defines(experts, route_warps(experts), _PAIRS_EACH), "STAGED": _staged_places(experts)}
    shared = 4 * (_staged_places(experts) + _count_words(experts))
    files = "primitives.cu", "grouped/sort.cu", "grouped/route.cu"
    return Source("route_pairs", define(own) + "".join(map(read, files)), shared)


@cache
def route_many_sources(experts: int) -> tuple[Source, Source]:
    """The sort of more pairs: the launch that counts, and the one that places."""
    files, shared = ("primitives.cu", "grouped/sort.cu", "grouped/route_many.cu"), 4 * _count_words(experts)
    sizes = _sort_defines(experts, route_warps(experts), _PAIRS_EACH)
    count, place = (
        Source(name, define({**sizes, "NAME": name, "PLACES": n}) + "".join(map(read, files)), shared)
        for n, name in enumerate(("count_pairs", "place_pairs"))
    )
    return count, place


def sum_words(pairs: int, experts: int) -> int:
    """Integers of `sums` of the sort of so many pairs; 0 where one block sorts them."""
    blocks = -(-pairs // block_pairs(experts))
    return (blocks + 1) * experts + 1 if blocks > 1 else 0
