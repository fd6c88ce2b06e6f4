"""Hopper's kernel for attention of chunks as a source: macros from a model's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from realizar.backends.cuda.native.compiler import Source, read
from realizar.backends.cuda.native.sources import Defines, define, wgmma_operands

_TYPES = {"bf16": ("bf16.bf16", "cvt.rn.bf16x2.f32"), "f16": ("f16.f16", "cvt.rn.f16x2.f32")}
# Of a thread of a consumer, of the producer, and of what decodes, by consumers.
_REGISTERS = {1: (0, 0, 0), 2: (232, 40, 0), 3: (160, 32, 0)}
_SHARED_REGISTERS = 216, 40, 0  # where two blocks share a multiprocessor
_CODED_REGISTERS = {1: (240, 48, 48), 2: (216, 40, 40)}
# Keys of a part at least; as many as could be attended in the time that a part takes besides; and the rounds of the
# card from which on tiles are not cut.
_LEAST_PART, _PART_COST, _FEW_ROUNDS = 1024, 384, 4
_CODED = ("int8", "fp8")
_SHARED_BYTES, _MOST_SLOTS, _CODE_SLOTS = 224 << 10, 8, 3
_NARROW_WINDOW = 256
_SIZES = "p" * 15 + "ff" + "i" * 9  # of arguments behind queries and cache
_KEPT_BYTES = 1 << 10  # of shared memory, of each block
MOST_WARPS = 12  # of consumers
ALONE_WARPS, ALONE_ROWS = 4, 64  # of consumers of a single token, and its queries, at most
_WGMMA = "bulk.cu", "chunks/warpgroups.cu", "chunks/tiles.cu", "chunks/rows.cu", "chunks/copies.cu", "chunks/attend.cu"
_FILES = "primitives.cu", *_WGMMA
_SYNC_FILES = (
    "primitives.cu", "mma_sync_instructions.cu", "chunks/sync_copies.cu", "chunks/rows.cu", "chunks/sync_attend.cu"
)  # fmt: skip


def chunk_rows(head: int, kv_dtype: str) -> int:
    """Queries of a tile, at most; 0 where there is no kernel for a head size or cache.

    Sums of wider heads, and what decodes int8 or e4m3, leave less room.
    """
    coded = kv_dtype in _CODED
    if kv_dtype not in _TYPES and not coded:
        return 0
    if head == 512:
        return 64
    if head % 8 or not 64 <= head <= 256 or (coded and head > 128 and head % 64):
        return 0
    return 192 if head == 64 and not coded else 128


class SyncShape(NamedTuple):
    """Of blocks of threads: queries, 16 or 32 for each warp; keys at once; warps; and blocks of a multiprocessor.

    `skips`: where no largest score of a warp rose, its sums are not rescaled.
    """

    rows: int
    keys: int
    warps: int
    blocks: int
    skips: bool = True

    def shared_bytes(self, head: int) -> int:
        """Of queries, keys and values, with 16 bytes between rows."""
        return (self.rows + 2 * self.keys) * (head * 2 + 16)


_SYNC_64 = SyncShape(128, 128, 4, 2, skips=False)
_SYNC_128 = SyncShape(128, 64, 4, 2), SyncShape(128, 64, 8, 1)
_SYNC_256 = SyncShape(128, 64, 8, 1, skips=False)


def sync_shape(head: int, card_bytes: int, *, plain: bool) -> SyncShape | None:
    """The shape for mma.sync on a card of which a block may have so much shared memory; None where none fits.

    `plain`: neither a window nor a cap, which take registers.
    """
    shapes = ((_SYNC_64,) if head == 64 and plain else ()) + (_SYNC_128 if head <= 128 else (_SYNC_256,))
    room = card_bytes + _KEPT_BYTES
    return next((each for each in shapes if each.blocks * (each.shared_bytes(head) + _KEPT_BYTES) <= room), None)


def sync_rows(head: int, kv_dtype: str, card_bytes: int) -> int:
    """Queries of a tile for mma.sync, at most; 0 where there is no kernel for a head size, cache or card."""
    shape = sync_shape(head, card_bytes, plain=False)
    return shape.rows if shape and kv_dtype in _TYPES and head % 16 == 0 and 64 <= head <= 256 else 0


@dataclass(frozen=True, slots=True)
class ChunkKernel:
    """Shape of one compiled kernel.

    Attributes:
        head: a size that the kernel has. group: query heads of a KV head.
        tokens: of a tile; `tokens * group` is at most what the kernel has rows for.
        kv_dtype: of the cache: `bf16`, `f16`, `int8` or `fp8`. block_size: tokens of its blocks, a power of two.
        window: keys that a query sees, or 0. cap, sinks: the layer caps scores, has sinks.
    """

    head: int
    group: int
    tokens: int
    kv_dtype: str
    block_size: int
    window: int = 0
    cap: bool = False
    sinks: bool = False

    @property
    def element(self) -> str:
        """Of queries and products."""
        return "f16" if self.coded else self.kv_dtype

    @property
    def coded(self) -> bool:
        return self.kv_dtype in _CODED

    @property
    def part_floats(self) -> int:
        """Of what the parts of a context hand on, for each of them: 0 where contexts are whole."""
        return 0

    def _defines(self) -> Defines:
        types, convert = _TYPES[self.element]
        return {
            "NAME": self._name, "HEAD": self.head, "GROUP": self.group, "TOKENS": self.tokens,
            "BLOCK_SIZE": self.block_size, "WINDOWED": int(self.window > 0), "CAP": int(self.cap),
            "SINKS": int(self.sinks), "TYPE_TEXT": f'"{types}"', "CONVERT_TEXT": f'"{convert}"',
        }  # fmt: skip

    @property
    def _name(self) -> str:
        return f"attend_chunk_{self.kv_dtype}_head{self.head}_group{self.group}"


@dataclass(frozen=True, slots=True)
class AttendChunkKernel(ChunkKernel):
    """Hopper's: of a head size that has `chunk_rows`, as many as a tile has at most.

    Attributes:
        part: keys of a part of the context where it is cut at fixed places, a power of two from 512 on, or 0.
        in_fp8: it can write 8-bit floats, of heads of a multiple of 128 dimensions.
        alone: tiles are of single tokens, as `StepArrays` has decodes, with blocks of threads for each token, KV head,
            and some parts of the context.
    """

    part: int = 0
    alone: bool = False
    in_fp8: bool = False

    @property
    def sizes(self) -> str:
        """Of the arguments, as `Kernel.launch` takes them."""
        return ("tpppp" if self.coded else "ttt") + _SIZES

    @property
    def consumers(self) -> int:
        """Warpgroups of 64 queries, `split` of them for the same."""
        return -(-self.tokens * self.group // 64) * self.split

    @property
    def split(self) -> int:
        return 2 if self.head > 256 else 1

    @property
    def keys(self) -> int:
        """Keys of a place in the ring: few where most of many would lie outside of a narrow window."""
        if 0 < self.window <= _NARROW_WINDOW and self.head <= 256:
            return 64
        return 128 if self.head <= 128 else 64 if self.head <= 256 else 32

    @property
    def slots(self) -> int:
        """Places of the ring that matrix instructions read."""
        room = (
            _SHARED_BYTES // self.blocks - self._row_bytes * self._rows - self.code_slots * self._code_bytes * self.keys
        )
        return min(_MOST_SLOTS, room // (self._row_bytes * self.keys))

    @property
    def code_slots(self) -> int:
        """Places of the ring of codes."""
        return _CODE_SLOTS if self.coded else 0

    @property
    def _rows(self) -> int:
        return self.consumers // self.split * 64

    @property
    def _row_bytes(self) -> int:
        return -(-self.head // 64) * 128

    @property
    def _code_bytes(self) -> int:
        return self.head + (2 * -(-self.head // 32) if self.kv_dtype == "int8" else 0)

    @property
    def blocks(self) -> int:
        """Of threads that share a multiprocessor."""
        return 2 if self.alone and self.head <= 128 and self.consumers == 1 and not self.coded else 1

    @property
    def sum_width(self) -> int:
        """Dimensions of an instruction that adds values: blocks that decode have no registers for wide ones."""
        own = self.head // self.split
        if not self.coded or own <= 128:
            return own
        return 64 if own % 128 else 128

    @property
    def threads(self) -> int:
        return (self.consumers + 1 + self.coded) * 128

    @property
    def shared_bytes(self) -> int:
        rows = self._row_bytes * (self._rows + self.slots * self.keys)
        return rows + self.code_slots * self._code_bytes * self.keys

    @property
    def warps(self) -> int:
        """Of the consumers."""
        return self.consumers * 4

    @property
    def part_floats(self) -> int:
        """Of what the parts of a context hand on, for each of them."""
        return self.consumers * 64 * (self.head // self.split + 8)

    def grid(self, tiles: int, kv_heads: int, processors: int) -> tuple[int, int, int]:
        """Of a launch for a step's tiles: blocks that take one after another."""
        return processors, 1, 1

    def source(self) -> Source:
        registers, producer, decoder = (_CODED_REGISTERS if self.coded else _REGISTERS)[self.consumers]
        if self.blocks > 1:
            registers, producer, decoder = _SHARED_REGISTERS
        width = self.sum_width
        values: Defines = {
            **self._defines(), "KEYS": self.keys, "CONSUMERS": self.consumers, "SPLIT": self.split,
            "SLOTS": self.slots, "REGISTERS": registers, "PRODUCER_REGISTERS": producer, "DECODER_REGISTERS": decoder,
            "LEAST_PART": _LEAST_PART // self.keys, "PART_COST": -(-_PART_COST // self.keys), "FEW_ROUNDS": _FEW_ROUNDS,
            "FIXED": self.part // self.keys, "ALONE": int(self.alone), "BLOCKS": self.blocks, "CODED": int(self.coded),
            "E4M3": int(self.kv_dtype == "fp8"), "IN_FP8": int(self.in_fp8),
            "SKIPS": 1, "CODE_SLOTS": self.code_slots, "KEYS_TEXT": f'"{self.keys}"', "SUM_WIDTH": width,
            "SUM_TEXT": f'"{width}"',
            **wgmma_operands("SCORE", self.keys // 2, "%{0}, %{1}, %{2}"),
            **wgmma_operands("SUM", width // 2, "{{%{0}, %{1}, %{2}, %{3}}}, %{4}"),
        }  # fmt: skip
        return Source(self._name, define(values) + "".join(map(read, _FILES)), self.shared_bytes)


@dataclass(frozen=True, slots=True)
class SyncChunkKernel(ChunkKernel):
    """That of mma.sync, of a head size and cache that have `sync_rows`."""

    shape: SyncShape = _SYNC_128[0]

    @property
    def sizes(self) -> str:
        """Of the arguments, as `Kernel.launch` takes them."""
        return "pppp" + _SIZES

    @property
    def warps(self) -> int:
        return self.shape.warps

    @property
    def keys(self) -> int:
        """That are multiplied at once."""
        return self.shape.keys

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_bytes(self) -> int:
        return self.shape.shared_bytes(self.head)

    def grid(self, tiles: int, kv_heads: int, processors: int) -> tuple[int, int, int]:
        """Of a launch for a step's tiles: a block for each of a KV head."""
        return kv_heads, tiles, 1

    def source(self) -> Source:
        shape = self.shape
        own: Defines = {
            "ROWS": shape.rows, "KEYS": shape.keys, "WARPS": shape.warps, "BLOCKS": shape.blocks,
            "SKIPS": int(shape.skips), "IN_FP8": 0, "E4M3": 0,
        }  # fmt: skip
        return Source(self._name, define(self._defines() | own) + "".join(map(read, _SYNC_FILES)), self.shared_bytes)
