"""Tiles and splits worth measuring for a number of tokens. torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.matmul.tuning_table import DeviceTuning
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, Tiles, WgmmaTiles

_REGISTERS = 65_536  # of a multiprocessor
_STATIC_BYTES = 4096  # shared memory that kernels take beside the ring, rounded up
_SPLITS = (1, 2, 3, 4, 5, 6, 8, 12)
_WAVES = 2.2  # rounds of blocks beyond which splitting only writes more

# tiles, parts, unroll, blocks
_ONE_TOKEN = (
    (8, 1, 2, 3), (4, 2, 2, 3), (2, 4, 2, 3), (8, 1, 1, 4), (4, 2, 1, 4), (4, 1, 2, 6), (8, 1, 4, 2), (4, 2, 4, 2),
    (8, 1, 3, 2), (4, 4, 2, 1), (1, 5, 2, 4), (1, 8, 2, 3), (1, 12, 2, 2), (1, 16, 2, 1), (4, 4, 1, 2),
)  # fmt: skip
_FEW_TOKENS = (
    (8, 1, 1, 3), (4, 2, 1, 3), (8, 1, 2, 2), (4, 2, 2, 2), (8, 1, 1, 2), (4, 1, 2, 4), (4, 4, 1, 1), (2, 4, 1, 3),
    (1, 8, 2, 2), (1, 5, 2, 3), (1, 16, 1, 1),
)  # fmt: skip
# strips, groups, stages, step, blocks
_SMALL = (
    (1, 1, 4, 1, 3), (1, 1, 6, 1, 2), (1, 1, 8, 1, 2), (1, 1, 4, 2, 2), (1, 1, 3, 4, 2), (1, 2, 4, 1, 2),
    (1, 2, 3, 2, 2), (2, 1, 4, 1, 2), (2, 1, 6, 1, 2), (2, 1, 3, 2, 2), (2, 1, 6, 2, 1), (2, 2, 4, 1, 2),
    (2, 2, 8, 1, 1), (2, 2, 4, 2, 1), (1, 4, 4, 1, 1), (1, 2, 6, 2, 1), (1, 4, 4, 2, 1), (1, 2, 4, 2, 1),
)  # fmt: skip
_LARGE = (
    (1, 1, 4, 1, 1), (1, 2, 4, 1, 1), (1, 2, 5, 1, 1), (2, 2, 4, 1, 1), (2, 2, 5, 1, 1), (2, 2, 6, 1, 1),
    (1, 2, 3, 2, 1), (1, 2, 2, 2, 1), (1, 1, 3, 2, 1), (2, 2, 3, 2, 1), (2, 2, 2, 2, 1), (1, 2, 4, 1, 2),
    (1, 1, 4, 1, 2), (1, 1, 2, 2, 2), (2, 1, 4, 1, 1), (2, 1, 3, 2, 1),
)  # fmt: skip
# strips, stages, blocks
_MMA_SYNC = ((1, 4, 2), (1, 6, 1), (2, 4, 1), (2, 3, 2), (2, 6, 1), (4, 3, 1), (1, 3, 3))


def candidates(tokens: int, weight_format: FragmentFormat, device: DeviceTuning) -> Iterator[Tiles]:
    """Tiles that fit the device's registers and shared memory: the mat-vec up to `int8_tokens`, else tensor cores."""
    if tokens <= device.int8_tokens:
        yield from (MatvecTiles(tokens, *shape) for shape in (_ONE_TOKEN if tokens == 1 else _FEW_TOKENS))
        return
    block = device.block_tokens(tokens)
    tiles: Tiles
    if not device.wgmma:
        for strips, stages, blocks in _MMA_SYNC:
            tiles = MmaSyncTiles(block, strips, stages, blocks)
            if (tiles.shared_bytes(weight_format) + _STATIC_BYTES) * blocks <= device.shared_bytes:
                yield tiles
        return
    for shape in _SMALL if block <= 64 else _LARGE:
        tiles = WgmmaTiles(block, *shape)
        available = tiles.registers or _REGISTERS // (tiles.threads * tiles.blocks)
        needed = tiles.strips * (block // 2 + 32) + 48  # accumulators, two operands, the rest
        if (
            tiles.shared_bytes(weight_format) * tiles.blocks + _STATIC_BYTES <= device.shared_bytes
            and needed <= available
        ):
            yield tiles


def split_counts(tiles: Tiles, tokens: int, out_features: int, chunks: int, device: DeviceTuning) -> list[int]:
    """Splits that leave about two rounds of blocks at most, and each warp three chunks at least."""
    matvec, processors = isinstance(tiles, MatvecTiles), device.processors
    if matvec and device.keeps_columns(out_features):
        return [1]
    x, _, z = tiles.grid(out_features, 1, 1 if matvec else -(-tokens // tiles.tokens))
    parts = tiles.parts if isinstance(tiles, MatvecTiles) else 1
    limit = processors * tiles.blocks * _WAVES
    return [s for s in _SPLITS if s == 1 or (x * z * s <= limit and chunks // (s * parts) >= 3)]
