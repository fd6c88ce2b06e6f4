"""Hopper's kernels for chunks of gated delta nets as sources: macros from a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cuda.native.compiler import Source, read
from realizar.backends.cuda.native.sources import Defines, define, wgmma_operands

SCAN_HEAD = 128  # of keys and of values: the one size that there are kernels for
THREADS = {"inputs": 128, "prepare": 128, "states": 384, "rows": 416}
# Of a tile and a value head: `links` and `factors` of tiles.cu.
LINK_BYTES, FACTOR_BYTES = 2 * 64 * 64 * 2, (2 * 64 + 4) * 4
_SLOTS, _SLOT_BYTES = 3, 57 << 10
_STATES = 3  # that `rows` has in shared memory
_BESIDE_BYTES = 24 << 10, 4 * 64 * 20 * 4  # the ring of `states`: operands, and outputs as they are transposed
_BOTH_SHARED = "%{0}, %{1}, %{2}"
_INSTRUCTIONS = "primitives.cu", "bulk.cu", "chunks/warpgroups.cu"


@dataclass(frozen=True, slots=True)
class ScanKernels:
    """Shape of a net whose heads have SCAN_HEAD features.

    Attributes:
        length: of the convolution. ring: tokens of a ring of inputs.
        tiled: whether value head h has key head h modulo `key_heads`, and not its share of neighbours.
    """

    key_heads: int
    value_heads: int
    length: int
    ring: int
    tiled: bool

    def sources(self) -> dict[str, Source]:
        """Those of a scan, in the order in which they run."""
        return {"inputs": self._inputs(), "prepare": self._prepare(), "states": self._states()}

    def rows(self) -> Source:
        """That of rows of one token each."""
        return self._source("rows", self._ring | {"SLOTS": _STATES}, _STATES * SCAN_HEAD * SCAN_HEAD * 4)

    @property
    def _ring(self) -> Defines:
        channels = (2 * self.key_heads + self.value_heads) * SCAN_HEAD
        return {"LENGTH": self.length, "RING": self.ring, "WIDTH": channels + 2 * self.value_heads}

    def _inputs(self) -> Source:
        return self._source("inputs", self._ring, 0)

    def _prepare(self) -> Source:
        return self._source("prepare", wgmma_operands("SHARED", 32, _BOTH_SHARED), 2 * SCAN_HEAD * 64 * 2)

    def _states(self) -> Source:
        inputs = "{{%{0}, %{1}, %{2}, %{3}}}, %{4}, %{5}"
        own: Defines = {
            "SLOTS": _SLOTS, **wgmma_operands("TILE", 32, inputs), **wgmma_operands("STATE", SCAN_HEAD // 2, inputs),
            **wgmma_operands("SHARED", 32, _BOTH_SHARED),
        }  # fmt: skip
        return self._source("states", own, _SLOTS * _SLOT_BYTES + sum(_BESIDE_BYTES))

    def _source(self, part: str, own: Defines, shared_bytes: int) -> Source:
        name = f"scan_{part}_heads{self.key_heads}_{self.value_heads}"
        shape: Defines = {
            "NAME": name, "KEY_HEADS": self.key_heads, "VALUE_HEADS": self.value_heads, "TILED": int(self.tiled),
        }  # fmt: skip
        files = *_INSTRUCTIONS, "scans/tiles.cu", f"scans/{part}.cu"
        return Source(name, define(shape | own) + "".join(map(read, files)), shared_bytes)
