"""KV blocks in numpy: written and read by the documented layout, with poison wherever nothing was written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kv.layout import KVLayout
from realizar.quantization.microscaling import e4m3
from reference_model import nearest_e4m3

GROUP = 32
Floats = NDArray[np.float64]


def layout_of(num_kv_heads: int, head_size: int, dtype: str) -> KVLayout:
    """Of blocks of 32 tokens; where a type's numbers have scales of a layer, with some."""
    return KVLayout(num_kv_heads, head_size, 32, dtype, (0.37, 1.9) if dtype == "fp8" else (1.0, 1.0))


class KVBlocks:
    """`count` blocks of one layer; every byte 0xFF (a NaN) but the padding of heads, which is zero."""

    def __init__(self, layout: KVLayout, count: int) -> None:
        self.layout, self.count = layout, count
        self.memory = np.full((count, layout.num_kv_heads, layout.head_bytes), 0xFF, np.uint8)
        zeros = np.zeros((layout.padded_head_size - layout.head_size, layout.block_size), self.element)
        for block in range(count):
            for head in range(layout.num_kv_heads):
                keys, values, _, _ = self.parts(block, head)
                keys[layout.head_size :] = zeros
                values[:, layout.head_size :] = zeros.T

    @property
    def element(self) -> type[np.generic]:
        return {"f16": np.float16, "bf16": np.uint16, "int8": np.int8, "fp8": np.uint8, "f32": np.float32}[
            self.layout.dtype
        ]

    def parts(self, block: int, head: int) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        """Views: keys [dimensions, tokens], values [tokens, dimensions], scales [groups, tokens], [tokens, groups]."""
        layout, raw = self.layout, self.memory[block, head]
        plane, scale, size, padded = layout.plane_bytes, layout.scale_bytes, layout.block_size, layout.padded_head_size
        keys, values = raw[:plane].view(self.element), raw[plane : 2 * plane].view(self.element)
        at = 2 * plane
        scales = raw[at : at + scale].view(np.float32), raw[at + scale : at + 2 * scale].view(np.float32)
        return (
            keys.reshape(padded, size), values.reshape(size, padded), scales[0].reshape(-1, size),
            scales[1].reshape(size, -1),
        )  # fmt: skip

    def write(self, slot: int, keys: Floats, values: Floats) -> None:
        """Write one token's keys and values [KV heads, head size], rounded to the element type."""
        block, place, width = slot // self.layout.block_size, slot % self.layout.block_size, self.layout.head_size
        for head in range(self.layout.num_kv_heads):
            key_plane, value_plane, key_scales, value_scales = self.parts(block, head)
            for row, plane, scales in (
                (keys[head] / self.layout.scales[0], key_plane.T, key_scales.T),
                (values[head] / self.layout.scales[1], value_plane, value_scales),
            ):
                plane[place, :width] = self._narrow(row, scales[place] if scales.size else scales)

    def read(self, slot: int) -> tuple[Floats, Floats]:
        """One token's keys and values [KV heads, head size] as stored."""
        block, place, width = slot // self.layout.block_size, slot % self.layout.block_size, self.layout.head_size
        keys, values = (np.zeros((self.layout.num_kv_heads, width)) for _ in range(2))
        for head in range(self.layout.num_kv_heads):
            key_plane, value_plane, key_scales, value_scales = self.parts(block, head)
            keys[head] = self._widen(key_plane[:, place], key_scales[:, place] if key_scales.size else key_scales)[
                :width
            ]
            scales = value_scales[place] if value_scales.size else value_scales
            values[head] = self._widen(value_plane[place], scales)[:width]
        return keys * self.layout.scales[0], values * self.layout.scales[1]

    def _narrow(self, row: Floats, scales: NDArray[np.float32]) -> NDArray:
        single = row.astype(np.float32)
        if self.layout.dtype == "bf16":
            bits = single.view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        if self.layout.dtype == "fp8":
            return nearest_e4m3(single)
        if self.layout.dtype != "int8":
            return single.astype(self.element)
        for group in range(len(scales)):
            scales[group] = max(np.abs(single[group * GROUP : (group + 1) * GROUP]).max(), 1e-30) / 127
        return np.rint(np.nan_to_num(single / np.repeat(scales, GROUP)[: single.size])).astype(np.int8)

    def _widen(self, row: NDArray, scales: NDArray[np.float32]) -> Floats:
        if self.layout.dtype == "bf16":
            return (row.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        wide = (e4m3()[row] if self.layout.dtype == "fp8" else row).astype(np.float64)
        return wide * np.repeat(scales.astype(np.float64), GROUP) if self.layout.dtype == "int8" else wide
