"""Tiles of grouped matmuls, and the memory that their pairs take. torch-free.

They come from measured lines, or by rule where there are none. The places of a tile depend on a step's padded rows
alone, so that a graph holds one kernel for each matmul. Experts that are chosen more often take several tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.tuning_table import ExpertLine, ExpertShape, measured_places
from realizar.backends.cuda.native.grouped.source import FUSED_PAIRS, DirectTiles, FusedTiles, GroupedTiles
from realizar.backends.cuda.native.sources import FP8Tiles

TILE_TOKENS = (8, 16, 32, 64, 128)
BETWEEN_TOKENS = (24, 40, 48)  # places that the Hopper kernel takes where a line has them
MMA_SYNC_TOKENS = 64  # the largest tile of mma.sync
FP8_PLACES = FP8Tiles().tokens
DECODED_PAIRS, STORED_PAIRS = 512, 32
"""Pairs of an expert, on average, from which on 8-bit floats are taken where they are asked for: fewer gain nothing, as
all experts are decoded first, but where weights are stored so."""
DIRECT_TOKENS = 16  # the largest tile of kernels whose warps read weights for themselves
_REGISTERS = 65_536  # of a multiprocessor
_STATIC_BYTES = 48 << 10  # of shared memory that a kernel may declare
_DIRECT_REGISTERS = 42  # of a thread of such a kernel beside the weights that are on their way
_LAID_TOKENS = 64  # places from which on gate and up have rows laid in tiles first, on Hopper
_ROOM = 1.3  # places of a tile for each pair that an expert has on average
_LEAST_STAGES, MOST_STAGES = 3, 8  # of a ring
_BLOCK_BYTES = 1024  # of shared memory that the device keeps for itself in each block
_MULTIPROCESSOR_BYTES = 1024  # that all blocks of a multiprocessor may have beyond what one block may
_WGMMA = {8: (2, 1, (3, 4)), 16: (2, 1, (4, 4)), 32: (2, 1, (3, 3)), 64: (2, 2, (1, 1)), 128: (2, 2, (1, 1))}
"""Strips, warpgroups and blocks per multiprocessor, without and with an activation, of tiles up to so many places."""
_FUSED = {8: (2, 1, 4), 16: (2, 1, 3)}
"""Strips of down, warpgroups and at most so many blocks per multiprocessor of gate and up and down in one launch."""
_FUSED_FEW, _FEW_PAIRS = (1, 1, 3), 96  # the same of up to so many pairs, whose items are few
_FUSED_EXPERTS = 512  # whose counts a block has room for
_WGMMA_E2M1 = _WGMMA | {64: (2, 1, (2, 2))}
"""The same for floats of four bits, but for rows that are laid in tiles."""


def tile_tokens(rows: int, per_token: int, experts: int, wgmma: bool) -> int:
    """Places of a tile for a step of `rows`: enough for most experts where all are chosen equally often."""
    most = TILE_TOKENS[-1] if wgmma else MMA_SYNC_TOKENS
    wanted = min(_ROOM * rows * per_token / experts, most)
    return next(size for size in TILE_TOKENS if size >= wanted)


def most_tiles(pairs: int, experts: int, tokens: int) -> int:
    """The most tiles of `tokens` places that so many pairs may fill, each of one expert."""
    used = min(pairs, experts)
    return used + (pairs - used) // tokens


@dataclass(frozen=True, slots=True)
class StepTiles:
    """At most `count` tiles of `tokens` places each; `shared` are those of the pairs whose expert all rows share.

    `in_fp8`: they are multiplied in 8-bit floats.
    """

    pairs: int
    tokens: int
    count: int
    shared: int = 0
    in_fp8: bool = False

    @property
    def places(self) -> int:
        return self.count * self.tokens


def step_tiles(
    rows: int, per_token: int, shape: ExpertShape, wgmma: bool, lines: Sequence[ExpertLine] = (), shared: int = 0,
    fp8_pairs: int = 0,
) -> StepTiles:  # fmt: skip
    """Tiles of a step of `rows`, which choose `per_token` experts each.

    Args:
        shared: 1 if all rows share one expert more, whose pairs do not count for the places of a tile; else 0.
        fp8_pairs: of an expert, on average, from which on steps are multiplied in 8-bit floats; 0 where none is.
    """
    measured = measured_places(lines, rows * per_token, shape)
    tokens = tile_tokens(rows, per_token, shape.experts, wgmma) if measured is None else measured
    in_fp8 = 0 < fp8_pairs * shape.experts <= rows * per_token
    if in_fp8:
        tokens = FP8_PLACES
    count = most_tiles(rows * per_token, shape.experts, tokens) + shared * -(-rows // tokens)
    return StepTiles(rows * (per_token + shared), tokens, count, rows * shared, in_fp8)


@cache
def grouped_tiles(
    tokens: int, weight_format: FragmentFormat, gated: bool, wgmma: bool, shared_bytes: int
) -> GroupedTiles:
    """The tiling of a grouped matmul in tiles of `tokens` places, with a ring as deep as shared memory allows.

    `gated`: gate and up are multiplied. `wgmma`: the Hopper kernel runs.
    """
    tiles = GroupedTiles("mma_sync", tokens, 2, 1, MOST_STAGES, 1)
    if wgmma:
        most, laid = next(size for size in TILE_TOKENS if size >= tokens), gated and lays_rows(tokens, wgmma)
        strips, groups, blocks = (_WGMMA_E2M1 if weight_format.e2m1 and not laid else _WGMMA)[most]
        tiles = GroupedTiles("wgmma", tokens, strips, groups, MOST_STAGES, blocks[gated], laid)
    return fitted(tiles, weight_format, gated, shared_bytes)


def lays_rows(tokens: int, wgmma: bool) -> bool:
    """True if gate and up in tiles of so many places have rows laid before them, where no line was measured."""
    return wgmma and tokens >= _LAID_TOKENS


@cache
def fitted(tiles: GroupedTiles, weight_format: FragmentFormat, gated: bool, shared_bytes: int) -> GroupedTiles:
    """Tiles with fewer stages, then blocks, then warpgroups, until a format's blocks fit the shared memory."""
    while not _fits(tiles, weight_format, gated, shared_bytes):
        if tiles.stages > _LEAST_STAGES:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.blocks > 1:
            tiles = replace(tiles, blocks=tiles.blocks - 1, stages=MOST_STAGES)
        elif tiles.groups > 1:
            tiles = replace(tiles, groups=1, stages=MOST_STAGES)
        else:
            break  # nothing is smaller; loading it says so
    return tiles


@cache
def fused_tiles(
    step: StepTiles, formats: tuple[FragmentFormat, FragmentFormat], experts: int, shared_bytes: int
) -> FusedTiles | None:
    """Tiles of gate and up and down in one launch, with a ring as deep as shared memory allows.

    `formats` are of gate and up, and of down. None where a launch each does better, or the ring has no room.
    """
    if step.pairs > FUSED_PAIRS or step.tokens not in _FUSED or experts > _FUSED_EXPERTS:
        return None
    strips, groups, most = _FUSED_FEW if step.pairs <= _FEW_PAIRS else _FUSED[step.tokens]
    for blocks, stages in product(range(most, 0, -1), range(MOST_STAGES, _LEAST_STAGES - 1, -1)):
        tiles = FusedTiles(step.tokens, strips, groups, stages, blocks)
        if _have_room(tiles.shared_bytes(formats) + tiles.static_bytes(experts), blocks, shared_bytes):
            return tiles
    return None


def fits(tiles: DirectTiles, weight_format: FragmentFormat, chunks: int, shared_bytes: int) -> bool:
    """True if the blocks of a multiprocessor have shared memory for activations of so many chunks, and registers."""
    words = sum(weight_format.planes) // 32 + 1 + weight_format.minima + weight_format.two_level  # of a lane and a tile
    needed = _DIRECT_REGISTERS + 2 * words * tiles.ahead
    if needed * tiles.threads * tiles.blocks > _REGISTERS or tiles.static_bytes > _STATIC_BYTES:
        return False
    return _have_room(tiles.shared_bytes(chunks) + tiles.static_bytes, tiles.blocks, shared_bytes)


def _fits(tiles: GroupedTiles, weight_format: FragmentFormat, gated: bool, shared_bytes: int) -> bool:
    return _have_room(tiles.shared_bytes(weight_format, gated) + tiles.static_bytes, tiles.blocks, shared_bytes)


def _have_room(block: int, blocks: int, shared_bytes: int) -> bool:
    """True if a multiprocessor has shared memory for so many blocks of `block` bytes."""
    return (block + _BLOCK_BYTES) * blocks <= shared_bytes + _MULTIPROCESSOR_BYTES and block <= shared_bytes
