"""An RMSNorm of which one number per row is left to the matmul after it. torch only.

out = x * weight / sqrt(mean(x^2) + eps): the root needs the whole row, x * weight does not. So a kernel may take a row
in blocks of columns, none of which waits for another: each writes its columns of x * weight as the matmul's input and
its share of the sum of squares. The matmul, which multiplies a row's sums by a number anyway, multiplies by the root
as well; it adds the shares in a fixed order.

An input of half floats needs a power of two per row before the row is known. It comes from the squares of the norm
before, for between two norms a stream grows or shrinks little; that is why there are two buffers of squares, used in
turn. `kernels.normalize.stream_factor` says what the range holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FoldedNorm:
    """The norm scale that a matmul applies to its sums.

    Attributes:
        square_sums: float32 [>= tokens, parts], contiguous, 16-byte aligned: partial sums of a token's squares;
            parts is a multiple of 8, and those that no block wrote are 0.
        width: columns of the row.
        eps: added to the mean of squares.
    """

    square_sums: torch.Tensor
    width: int
    eps: float

    def arguments(self) -> tuple[int, int, float, float]:
        """The kernels' arguments: address, parts, 1 / width, epsilon."""
        return self.square_sums.data_ptr(), int(self.square_sums.shape[1]), 1.0 / self.width, self.eps


NO_NORM = (0, 0, 0.0, 0.0)
"""The same where nothing is deferred."""
