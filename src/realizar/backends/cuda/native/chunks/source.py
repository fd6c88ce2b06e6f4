"""Hopper's kernel for attention of chunks as a source: macros from a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cuda.native.compiler import Source, read

_TYPES = {"bf16": ("bf16.bf16", "cvt.rn.bf16x2.f32"), "f16": ("f16.f16", "cvt.rn.f16x2.f32")}
_REGISTERS = {1: (0, 0), 2: (232, 40), 3: (160, 32)}  # of a thread of a consumer and of the producer
_SHARED_BYTES, _MOST_SLOTS = 224 << 10, 8
_FILES = "primitives.cu", "bulk.cu", "chunks/attend.cu"


def chunk_rows(head: int) -> int:
    """Queries of a tile, at most; 0 where there is no kernel for a head size. Sums of wider heads leave less room."""
    if head % 8 or not 64 <= head <= 256:
        return 0
    return 192 if head == 64 else 128


@dataclass(frozen=True, slots=True)
class AttendChunkKernel:
    """Shape of one compiled kernel.

    Attributes:
        head: a size that has `chunk_rows`. group: query heads of a KV head.
        tokens: of a tile; `tokens * group` is at most the head's `chunk_rows`.
        element: of queries and cache: `bf16` or `f16`. block_size: tokens of the cache's blocks, a power of two.
        window, cap, sinks: the layer has one, caps scores, has sinks.
    """

    head: int
    group: int
    tokens: int
    element: str
    block_size: int
    window: bool = False
    cap: bool = False
    sinks: bool = False

    @property
    def consumers(self) -> int:
        """Warpgroups of 64 queries."""
        return -(-self.tokens * self.group // 64)

    @property
    def keys(self) -> int:
        """Keys of a place in the ring."""
        return 128 if self.head <= 128 else 64

    @property
    def slots(self) -> int:
        return min(
            _MOST_SLOTS, (_SHARED_BYTES - self._row_bytes * self.consumers * 64) // (self._row_bytes * self.keys)
        )

    @property
    def _row_bytes(self) -> int:
        return -(-self.head // 64) * 128

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * 128

    @property
    def shared_bytes(self) -> int:
        return self._row_bytes * (self.consumers * 64 + self.slots * self.keys)

    def source(self) -> Source:
        name = f"attend_chunk_{self.element}_head{self.head}_group{self.group}"
        types, convert = _TYPES[self.element]
        registers, producer = _REGISTERS[self.consumers]
        values = {
            "NAME": name, "HEAD": self.head, "GROUP": self.group, "TOKENS": self.tokens,
            "BLOCK_SIZE": self.block_size, "KEYS": self.keys, "CONSUMERS": self.consumers, "SLOTS": self.slots,
            "REGISTERS": registers, "PRODUCER_REGISTERS": producer, "WINDOWED": int(self.window), "CAP": int(self.cap),
            "SINKS": int(self.sinks), "TYPE_TEXT": f'"{types}"', "CONVERT_TEXT": f'"{convert}"',
            "KEYS_TEXT": f'"{self.keys}"', "HEAD_TEXT": f'"{self.head}"',
            **_operands("SCORE", self.keys // 2, "%{0}, %{1}, %{2}"),
            **_operands("SUM", self.head // 2, "{{%{0}, %{1}, %{2}, %{3}}}, %{4}"),
        }  # fmt: skip
        defines = "".join(f"#define {key} {value}\n" for key, value in values.items())
        return Source(name, defines + "".join(map(read, _FILES)), self.shared_bytes)


def _operands(name: str, accumulators: int, inputs: str) -> dict[str, str]:
    """Texts of an instruction's operands: its accumulators `c`, and numbers of the others."""
    return {
        f"{name}_LIST": '"' + ", ".join(f"%{i}" for i in range(accumulators)) + '"',
        f"{name}_INPUTS": '"' + inputs.format(*range(accumulators, accumulators + 5)) + '"',
        f"{name}_OPERANDS": ", ".join(f'"+f"(c[{i}])' for i in range(accumulators)),
    }
