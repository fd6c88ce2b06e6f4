"""`WeightLayout`: everything that a kernel must know of a weight format, as constants. numpy only.

Backends look kernels and packed formats up by layout, so that they need not know where a format comes from. A ggml type
has one layout (`ggml_layouts`); other formats bring their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatType = Literal["f32", "f16", "bf16"]
ScaleType = Literal["f32", "f16", "e8m0", "e4m3", "i8", "u8", "u4", "odd4"]


@dataclass(frozen=True, slots=True)
class Codebook:
    """A table of signed bytes, or of floats, that codes index. Codebooks of one name are one codebook.

    Attributes:
        entries: 16 numbers, or as many vectors as a code can index.
        vector_size: columns that an entry stands for: 1, 4 or 8.
        load: gives the table, int8 [entries] or int8 [entries, vector_size], or float32 [entries], read-only.
        floats: whether it is of floats, which no integers of eight bits stand for.
    """

    name: str
    entries: int
    vector_size: int
    load: Callable[[], NDArray[np.int8] | NDArray[np.float32]] = field(compare=False, repr=False)
    floats: bool = False


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The storage of a weight matrix's numbers. Layouts that compare equal are read by the same kernels.

    A weight is `scale * (code - offset) + minimum`, or `scale * codebook[code]`, per group of columns, as in `Planes`.
    A float matrix has no codes: `float_type` is set, and the fields from `bits` to `signs` keep their defaults.

    Attributes:
        name: as errors show it; two layouts whose blocks differ in any byte have two names.
        block_size: columns that are stored together: a matrix is cut between columns at multiples of it.
        block_bytes: bytes of `block_size` columns of one out_feature.
        float_type: element type of a float matrix; None where weights are codes.
        bits: width of a code, or of a vector codebook's index.
        offset: integer that is subtracted from a code; 0 with a codebook.
        group_size: columns that share a scale.
        scale: type that holds scales and minima, exactly but for those of safetensors in BF16, F32 and NVFP4, whose
            `Planes` are exact and which kernels round to `f16`. Two-level: `i8`; `u8` of at most six bits; `u4`; `odd4`
            is 2 n + 1 with n of four bits. One-level: `f16` or `f32`; `e8m0` and `e4m3` are half of such a number.
        minimum: whether a minimum is added.
        centred: whether a minimum is always minus half its scale, so that codes 0 and 1 mean minus and plus the same
            number; that number is of type `scale`.
        super_group_size: columns that share a super-scale, and a super-minimum where there are minima: float16 times a
            power of two. None where scales are one-level.
        codebook: the table that codes index; None where codes are integers.
        signs: whether every column has a sign beside its codebook entry.
    """

    name: str
    block_size: int
    block_bytes: int
    float_type: FloatType | None = None
    bits: int = 0
    offset: int = 0
    group_size: int = 1
    scale: ScaleType = "f16"
    minimum: bool = False
    centred: bool = False
    super_group_size: int | None = None
    codebook: Codebook | None = None
    signs: bool = False

    @property
    def is_float(self) -> bool:
        return self.float_type is not None

    @property
    def has_integers(self) -> bool:
        """True if weights before scaling are integers of eight bits, which kernels multiply by int8 activations."""
        return not self.is_float and not (self.codebook is not None and self.codebook.floats)

    @property
    def vector_size(self) -> int:
        return 1 if self.codebook is None else self.codebook.vector_size

    def row_bytes(self, in_features: int) -> int:
        """Bytes of one out_feature; ValueError where its columns are not a whole number of blocks."""
        blocks, rest = divmod(in_features, self.block_size)
        if rest:
            raise ValueError(f"{in_features} columns are not a whole number of {self.name} blocks")
        return blocks * self.block_bytes
