"""An RMSNorm whose scale is folded into the next matmul. torch only.

out = x * weight / sqrt(mean(x^2) + eps). The root needs all of a token's columns, x * weight does not. So a kernel may
take a token in blocks of columns, none of which waits for another: each writes its columns of x * weight as the
matmul's input, and a partial sum of squares. The matmul, which scales a token's sums anyway, applies the root as well;
it adds the partial sums in a fixed order.

An input of half floats needs a power of two per token before all of the token is known. It is taken from the squares
of the norm before, since a residual stream grows or shrinks little between two norms. Therefore there are two buffers
of partial sums of squares, used alternately. `kernels.normalize.stream_power` describes the range that this covers.
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
        width: columns of a token.
        eps: added to the mean of squares.
    """

    square_sums: torch.Tensor
    width: int
    eps: float

    def arguments(self) -> tuple[int, int, float, float]:
        """The kernels' arguments: address, parts, 1 / width, epsilon."""
        return self.square_sums.data_ptr(), int(self.square_sums.shape[1]), 1.0 / self.width, self.eps


NO_NORM = (0, 0, 0.0, 0.0)
"""The same arguments where no norm is folded."""
