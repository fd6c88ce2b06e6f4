"""The kernel for attention of single tokens as a source: macros from a model's shape and a step's."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cuda.native.compiler import Source, read
from realizar.backends.cuda.native.sources import Defines, define, of_fields

_ELEMENTS, _FORMS = ("bf16", "f16", "int8", "fp8"), ("f32", "int8", "half")  # numbered as in attend.cu
_FILES = "primitives.cu", "bulk.cu", "attend_heads.cu", "attend_results.cu", "attend.cu"
_TILE, _APART = 16, 32  # keys, and bytes between their runs


@dataclass(frozen=True, slots=True)
class AttendKernel:
    """Shape and parameters of one compiled attention kernel.

    Attributes:
        head: head size, a multiple of 8. group: query heads of a KV head.
        splits: of the matmul that it reads.
        norm: 0 none, 1 RMS, 2 layer, over a head of queries or keys.
        rotary: dimensions that rope rotates. interleaved: neighbours are pairs.
        element: of the cache: `bf16`, `f16`, `int8` or `fp8`; others have no kernel. block_size: tokens of its blocks.
        out: format of the result: `f32`, `int8` or `half`. block_tokens: of `half`.
        warps: of a block: 2, 4 or 8. resident: of a multiprocessor, that registers must allow.
        stages: tiles of 16 keys that a warp has asked for.
        runs: 4 or 1: copies that a tile comes by, apart so that they are read without bank conflicts where there are 4.
        bulk: the copy engine fetches tiles, where there is one; else each lane asks for 16 bytes at once.
        least: parts of a context are no shorter than `least` times 64 keys.
        cap: scores are capped. value_norm: values are divided by their root mean square.
        growth: queries grow with the position. stored: the cache has the new key and value already.
    """

    head: int
    group: int
    splits: int
    bias: bool
    norm: int
    norm_bias: bool
    rotary: int
    interleaved: bool
    element: str
    block_size: int
    out: str
    block_tokens: int
    warps: int = 4
    resident: int = 12
    stages: int = 1
    runs: int = 4
    bulk: bool = True
    least: int = 2
    cap: bool = False
    value_norm: bool = False
    growth: bool = False
    stored: bool = False

    @property
    def supported(self) -> bool:
        fits = self.head % 8 == 0 and self.head <= 512 and self.group <= 8 and self.block_size % _TILE == 0
        return self.element in _ELEMENTS and fits

    @property
    def coded(self) -> bool:
        """True for elements of a byte."""
        return self.element in ("int8", "fp8")

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a warp for a tile of keys and values, and their scales; its results take all stages'."""
        scales = 2 * -(-self.head // 32) if self.element == "int8" else 0
        each = (self.head if self.coded else 2 * self.head) + scales
        tiles = 2 * (_TILE * each + (_APART * self.runs if self.runs > 1 else 0))
        results = (self.group + 1) // 2 * (2 * self.head + 4) * 4
        return max(tiles, -(-results // (16 * self.stages)) * 16)

    @property
    def shared_bytes(self) -> int:
        return self.warps * self.stages * self.stage_bytes

    def source(self) -> Source:
        shape = f"{self.element}_head{self.head}_group{self.group}_{self.out}{self.block_tokens}"
        name = f"attend_{shape}_warps{self.warps}_{self.resident}_{self.stages}_{self.least}_{self.runs}"
        own: Defines = {"NAME": name, "ELEMENT": _ELEMENTS.index(self.element), "FORM": _FORMS.index(self.out)}
        values = of_fields(self) | own | {"STAGE_BYTES": self.stage_bytes}
        return Source(name, define(values) + "".join(map(read, _FILES)))
