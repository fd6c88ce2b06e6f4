"""Products of activations with quantised weights: what the rest of the backend calls.

The seam, all of it:

    packed = pack_matrix(planes, device)                # pack.py: once, at load
    products = Products(device, batch_invariant=False)
    form = products.activation_format(rows)             # ActivationFormat(kind, block_rows): depends on rows alone
    config = products.route(rows, packed)               # ProductConfig: the kernel, its tiles, its splits
    products.launch(packed, activations, partials, rows, config, stream)

`launch` writes float32 partial sums, partials[split, row, column]: a contiguous tensor [splits, >= rows, row_stride], of
which it fills rows 0 .. rows - 1 and `packed.rows` columns from `column` on, and nothing else. The kernel after it sums
the splits in order 0, 1, 2, ... and adds the bias. Matrices that share an input and differ in format are separate
`PackedMatrix` segments of one merged output, `column` apart; all of them take the same number of splits where they are
launched with configs from one `route_merged` call.

With programmatic dependent launch (`config.dependent`, compute capability 9.0 on) a product asks for its first weights
before it waits for the kernel before it, and lets the kernel after it start early: that one must itself execute
`griddepcontrol.wait` (Triton: `tl.extra.cuda.gdc_wait()`) before it reads the partials, if it is launched with
`launch_pdl=True`; launched plainly it need do nothing. A product reads activations and writes partials only after its
own wait, so it may follow any kernel.

Formats of activations: `pack_activations`. Layout of weights: `fragments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["int8", "half"]


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """The format that a step of some number of rows uses.

    Attributes:
        kind: `int8` or `half`.
        block_rows: rows of a block of the `half` format (8 to 256); 1 for `int8`.
    """

    kind: Kind
    block_rows: int

    def padded_rows(self, rows: int) -> int:
        """Rows that a buffer must hold."""
        return -(-rows // self.block_rows) * self.block_rows


@dataclass(frozen=True, slots=True)
class Int8Activations:
    """`int8` activations on the device.

    Attributes:
        codes: int8 [>= rows, padded_cols], contiguous, 16-byte aligned.
        terms: float32 [>= rows, padded_cols / 16, 2], contiguous.
    """

    codes: torch.Tensor
    terms: torch.Tensor


@dataclass(frozen=True, slots=True)
class HalfActivations:
    """`half` activations on the device.

    Attributes:
        values: float16 [blocks, padded_cols / 64, 8, block_rows / 8, 8, 8], contiguous, 128-byte aligned.
        row_scales: float32 [blocks * block_rows].
    """

    values: torch.Tensor
    row_scales: torch.Tensor


Activations = Int8Activations | HalfActivations


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How one product runs. Opaque but for `splits` and `format`.

    Attributes:
        kernel: which source.
        format: of the activations that it reads.
        splits: partial sums that it writes.
        tiles: the kernel's own parameters, in the order of its source's template.
        dependent: whether it is launched with programmatic stream serialisation.
    """

    kernel: Literal["matvec", "wgmma", "mma_sync"]
    format: ActivationFormat
    splits: int
    tiles: tuple[int, ...]
    dependent: bool = False
