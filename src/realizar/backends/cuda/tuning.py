"""Which tiles and splits a product takes: measured tables per GPU, and rules where no table speaks. torch-free.

A table is JSON in `tuning/`, one file per GPU, made by measuring; a line holds for one kernel, number of rows and shape,
and the nearest shape's line serves others.
"""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cuda.fragments import FragmentFormat
from realizar.backends.cuda.native.sources import MatvecTiles, MmaSyncTiles, Tiles, WgmmaTiles

INT8_ROWS = 4  # up to so many rows the integer mat-vec is taken


@dataclass(frozen=True, slots=True)
class Choice:
    """Tiles and splits of one product."""

    tiles: Tiles
    splits: int


@dataclass(frozen=True, slots=True)
class DeviceTuning:
    """The choices of one device.

    Attributes:
        wgmma: whether the Hopper kernel runs.
        processors: multiprocessors.
        int8_rows: the largest number of rows for the integer mat-vec.
    """

    wgmma: bool
    processors: int
    int8_rows: int = INT8_ROWS

    def block_rows(self, rows: int) -> int:
        """Rows of a block of `half` activations: the smallest of 8, 16, 32, 64, 128 and 256 that holds them, or 256."""
        return next((size for size in (8, 16, 32, 64, 128) if rows <= size), 256)

    def dependent(self, rows: int) -> bool:
        """Whether programmatic dependent launch pays."""
        return rows <= 128

    def few_rows(self, rows: int, rows_out: int, chunks: int, form: FragmentFormat) -> Choice:
        """The mat-vec's tiles: blocks of eight warps, enough of them for 24 warps a multiprocessor."""
        tiles = -(-rows_out // 64) * 4
        wanted = 24 * self.processors
        parts = next((p for p in (1, 2, 4) if tiles * p >= wanted or p == 4), 4)
        splits = max(1, min(wanted // (tiles * parts), chunks // (2 * parts)))
        unroll = 1 if rows > 4 else 2
        return Choice(MatvecTiles(rows, 8 // parts, parts, unroll, 2 if rows > 1 else 3), splits)

    def many_rows(
        self, rows: int, block_rows: int, rows_out: int, chunks: int, form: FragmentFormat, fixed: bool
    ) -> Choice:
        """The tensor-core kernels' tiles."""
        strips = -(-rows_out // 64)
        if not self.wgmma:
            tiles: Tiles = MmaSyncTiles(block_rows, 2, 4 if form.block_bytes < 4096 else 3, 1)
            return Choice(tiles, self._splits(-(-strips // 2), chunks, 2, fixed))
        if block_rows <= 64:
            tiles = WgmmaTiles(block_rows, 1, 1, 6 if form.block_bytes < 4096 else 4, 1, 2)
            return Choice(tiles, self._splits(strips, chunks, 2, fixed))
        tiles = WgmmaTiles(block_rows, 1, 2, 4 if block_rows <= 128 else 3, 1, 1)
        return Choice(tiles, self._splits(-(-strips // 2) * -(-rows // block_rows), chunks, 1, fixed))

    def _splits(self, blocks: int, chunks: int, resident: int, fixed: bool) -> int:
        """Splits that fill the device about once, each of at least eight chunks."""
        if fixed:
            return max(1, min(4, chunks // 8))
        return max(1, min(self.processors * resident // blocks, chunks // 8))


def load_tuning(name: str, capability: tuple[int, int], processors: int) -> DeviceTuning:
    """The tuning of a device.

    Args:
        name: as the driver reports it. capability: major and minor. processors: multiprocessors.
    """
    return DeviceTuning(wgmma=capability == (9, 0), processors=processors)
