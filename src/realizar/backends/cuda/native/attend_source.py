"""The kernel for attention of single tokens as a source: macros from a model's shape and a step's."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cuda.native.compiler import Source, read

MOST_SHARED_BYTES = 44 << 10  # static shared memory is 48 KiB at most
_ELEMENTS, _FORMS = ("bf16", "f16", "int8"), ("f32", "int8", "half")  # numbered as in attend.cu
_MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class AttendKernel:
    """What one compiled kernel is for.

    Attributes:
        head: head size, a multiple of 8. group: query heads of a KV head.
        splits: of the product that it reads. bias: whether one is added.
        norm: 0 none, 1 RMS, 2 layer, over a head of queries or keys. norm_bias: whether they have one.
        rotary: dimensions that rope turns. interleaved: whether neighbours are pairs.
        element: of the cache: `bf16`, `f16` or `int8`; others have no kernel. block_size: tokens of its blocks.
        out: what it writes: `f32`, `int8` or `half`. block_rows: of `half`.
        warps: of a block: 2, 4 or 8. resident: of a multiprocessor, that registers must allow; 8 where warps are.
        least: parts of a context are no shorter than so many times 64 keys.
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
    block_rows: int
    warps: int = 4
    resident: int = 12
    least: int = 2

    @property
    def supported(self) -> bool:
        """Whether there is a kernel of this shape."""
        floats = (self.group + 2 + self.warps * self.group) * self.head + self.group * (_MAX_PARTS + 2 * self.warps + 2)
        fits = self.head <= 256 and self.group <= 8 and floats * 4 <= MOST_SHARED_BYTES
        return self.element in _ELEMENTS and self.head % 8 == 0 and fits

    def source(self) -> Source:
        shape = f"{self.element}_head{self.head}_group{self.group}_{self.out}{self.block_rows}"
        name = f"attend_{shape}_warps{self.warps}_{self.resident}_{self.least}"
        values = {
            "NAME": name, "HEAD": self.head, "GROUP": self.group, "SPLITS": self.splits, "BIAS": int(self.bias),
            "NORM": self.norm, "NORM_BIAS": int(self.norm_bias), "ROTARY": self.rotary,
            "INTERLEAVED": int(self.interleaved), "ELEMENT": _ELEMENTS.index(self.element),
            "BLOCK_SIZE": self.block_size, "FORM": _FORMS.index(self.out),
            "BLOCK_ROWS": self.block_rows, "WARPS": self.warps,
            "RESIDENT": self.resident, "LEAST": self.least,
        }  # fmt: skip
        defines = "".join(f"#define {key} {value}\n" for key, value in values.items())
        return Source(name, defines + read("primitives.cu") + read("attend.cu"))
