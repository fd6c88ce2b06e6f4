"""The memory layout of a KV block on the CPU.

A layer is an array of blocks, a block an array of KV heads, a head:

    keys    [padded head size, block size]: transposed, so that a vector holds one dimension of several tokens
    values  [block size, padded head size]
    for int8: key scales float32 [groups, block size], value scales float32 [block size, groups], per 32 dimensions

A number of fp8 is a byte of e4m3, which is read as 2^-8 of what it says (`Emitter.load_float`): the layer's scales make
up for that.

The head size is padded to whole groups of 32; padding is zero and stays so. Scores are computed for 32 keys of a block
at once, so a block holds whole runs of 32 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 32
BLOCK_MULTIPLE = 32
KV_DTYPES = ("f16", "bf16", "int8", "fp8", "f32")  # f32 only by `auto`, for models whose weights are float32
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "int8": 1, "fp8": 1, "f32": 4}
READ_AS = 2.0**-8  # of a number in fp8


@dataclass(frozen=True, slots=True)
class KVLayout:
    """`scales` multiply all numbers of a layer's keys, and of its values."""

    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def padded_head_size(self) -> int:
        return -(-self.head_size // GROUP) * GROUP

    @property
    def plane_bytes(self) -> int:
        """Bytes of the keys (or values) of one head of a block."""
        return self.padded_head_size * self.block_size * ELEMENT_BYTES[self.dtype]

    @property
    def scale_bytes(self) -> int:
        """Scales of the keys (or values) of one head of a block."""
        return self.padded_head_size // GROUP * self.block_size * 4 if self.dtype == "int8" else 0

    @property
    def head_bytes(self) -> int:
        """Keys, values and, for int8, scales of one KV head in a block."""
        return 2 * (self.plane_bytes + self.scale_bytes)

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    def fields(self) -> dict[str, int | float]:
        """The fields by which a kernel finds its way in a layer's blocks, and the scales of what it reads there."""
        read_as = READ_AS if self.dtype == "fp8" else 1.0
        places = ("block_bytes", "head_bytes", "plane_bytes", "scale_bytes", "block_size")
        scales = {name: scale / read_as for name, scale in zip(("key_scale", "value_scale"), self.scales, strict=True)}
        return {name: getattr(self, name) for name in places} | scales
