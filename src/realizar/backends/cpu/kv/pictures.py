"""Keys and values of the picture that a tower encodes: each layer takes the place of the one before."""

from __future__ import annotations

import numpy as np

from realizar.backends.cpu.kv.layout import BLOCK_MULTIPLE, KVLayout
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.models.tower import Tower


class PictureKeys:
    """As `KVMemory`, for rows of as many tokens as a picture has patches, one at a time."""

    block_size = BLOCK_MULTIPLE

    def __init__(self, tower: Tower, dtype: str) -> None:
        self.dtype = dtype
        self.layouts = {
            layer: KVLayout(attention.num_kv_heads, attention.head_size, self.block_size, dtype)
            for layer, attention in tower.attentions()
        }
        most = max(layout.block_bytes for layout in self.layouts.values())
        self._memory = aligned_zeros(-(-tower.max_patches // self.block_size) * most, np.uint8)

    def group_of(self, _: int) -> int:
        return 0

    def address_of(self, _: int) -> int:
        return address(self._memory)
