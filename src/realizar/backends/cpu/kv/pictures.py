"""Keys and values of the picture that a tower encodes: each layer takes the place of the one before."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kv.layout import BLOCK_MULTIPLE, KVLayout
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.parts import windows_of
from realizar.models.tower import Tower


class PictureKeys:
    """As `KVMemory`, for the patches of one picture, which are one row; layers with windows have a row for each."""

    block_size = BLOCK_MULTIPLE

    def __init__(self, tower: Tower, dtype: str) -> None:
        self.dtype = dtype
        self.layouts = {
            layer: KVLayout(attention.num_kv_heads, attention.head_size, self.block_size, dtype)
            for layer, attention in tower.attentions()
        }
        self._groups = {
            layer: (place, group.window) for place, group in enumerate(tower.cache_groups()) for layer in group.layers
        }
        self._window = _window_of(tower)
        most = max(layout.block_bytes for layout in self.layouts.values())
        self._others = tower.max_tokens - tower.max_patches
        blocks = -(-tower.max_tokens // self.block_size) + most_windows(tower)  # the last of a window is not full
        self._memory = aligned_zeros(blocks * most, np.uint8)

    @property
    def size_bytes(self) -> int:
        return int(self._memory.nbytes)

    def group_of(self, layer: int) -> int:
        return self._groups[layer][0]

    def address_of(self, _: int) -> int:
        return address(self._memory)

    def place(
        self, rows: int, columns: int, slots: list[NDArray[np.int32]], tables: list[NDArray[np.int32]]
    ) -> list[NDArray[np.intp]]:
        """Write slots and block tables of each group for a picture of so many patches.

        Returns the patches of each window, in the order in which they have to be rows.
        """
        windows = windows_of(rows, columns, self._window)
        for place, window in set(self._groups.values()):
            parts = [np.arange(rows * columns + self._others)] if window is None else windows
            token = block = 0
            for row, part in enumerate(parts):
                blocks = -(-len(part) // self.block_size)
                tables[place][row, :blocks] = np.arange(block, block + blocks)
                slots[place][token : token + len(part)] = block * self.block_size + np.arange(len(part))
                token, block = token + len(part), block + blocks
        return windows


def most_windows(tower: Tower) -> int:
    """Of a picture; one without windows is a row as a whole."""
    edge = _window_of(tower)
    if edge is None:
        return 1
    sides = range(tower.merge, math.isqrt(tower.max_patches) + 1, tower.merge)
    return max(-(-side // edge) * -(-(tower.max_patches // side) // edge) for side in sides)


def _window_of(tower: Tower) -> int | None:
    return next((group.window for group in tower.cache_groups() if group.window is not None), None)
