"""Inputs of matmuls on the device: buffers of each format, one per number of columns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from realizar.backends.cuda.kernels import store_inputs as formats
from realizar.backends.cuda.matmul.tuning_table import most_tokens

CHUNK = 64  # columns of a chunk of the matmuls' own formats

InputKind = Literal["f32", "bf16", "f16", "int8", "half", "fp8"]

_CODES = {
    "f32": formats.PLAIN, "bf16": formats.PLAIN, "f16": formats.SCALED, "int8": formats.INT8, "half": formats.HALF,
    "fp8": formats.FP8,
}  # fmt: skip
_DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "half": torch.float16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InputFormat:
    """The format of an activation.

    Attributes:
        kind: token after token in a type (`f16` with a power of two per token), or one of the CUDA matmuls' formats.
        block_tokens: tokens of a block of `half` and `fp8`.
    """

    kind: InputKind
    block_tokens: int = 1


# out = x * weight / sqrt(mean(x^2) + eps). The root needs all of a token's columns, x * weight does not. So a kernel
# may take a token in blocks of columns, none of which waits for another: each writes its columns of x * weight as the
# matmul's input, and a partial sum of squares. The matmul, which scales a token's sums anyway, applies the root as
# well; it adds the partial sums in a fixed order.
#
# An input of half floats needs a power of two per token before all of the token is known. It is taken from the squares
# of the norm before, since a residual stream grows or shrinks little between two norms. Therefore there are two buffers
# of partial sums of squares, used alternately. `kernels.normalize.stream_power` describes the range that this covers.


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


@dataclass(frozen=True, slots=True)
class ActivationBuffer:
    """Memory for the tokens of a step in one format.

    Attributes:
        values: [tokens, cols], or float16 in the order of `layouts.activations`.
        scales: float32 [tokens], the divisor of each token.
        codes, terms: of `int8` and `fp8`.
        norm: the scale that the matmul which reads it must still apply, if any.
    """

    format: InputFormat
    cols: int
    values: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor
    terms: torch.Tensor
    norm: FoldedNorm | None = None

    def with_norm(self, norm: FoldedNorm | None) -> ActivationBuffer:
        return self if norm is None else replace(self, norm=norm)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of what the CUDA matmuls read: codes and terms, or values and scales."""
        both = (self.codes, self.terms) if self.format.kind in ("int8", "fp8") else (self.values, self.scales)
        return both[0].data_ptr(), both[1].data_ptr()

    @property
    def chunks(self) -> int:
        return -(-self.cols // CHUNK)

    def pointers(self) -> tuple[Any, ...]:
        """Kernel arguments values, value_stride, value_scale, codes and terms."""
        return self.values, self.cols, self.scales, self.codes, self.terms

    def constants(self) -> dict[str, Any]:
        return {
            "FORMAT": _CODES[self.format.kind].value,
            "BLOCK_TOKENS": self.format.block_tokens,
            "CHUNKS": self.chunks,
        }


class ActivationBuffers:
    """All buffers, made once; `tokens` is the most that a step may have."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._tokens, self._device = tokens, device
        self._made: dict[tuple[InputFormat, int, int, str], ActivationBuffer] = {}

    def get(self, input_format: InputFormat, cols: int, tokens: int | None = None) -> ActivationBuffer:
        """The buffer of a format and a number of columns: for the step's tokens, or for `tokens`."""
        return self._get(input_format, cols, tokens or self._tokens, "")

    def normed(self, input_format: InputFormat, cols: int) -> ActivationBuffer:
        """The buffer of norms of the stream, which a matmul that reads as many columns of integers may write."""
        return self._get(input_format, cols, self._tokens, "norm" if input_format.kind == "int8" else "")

    def parallel(self, input_format: InputFormat, cols: int) -> ActivationBuffer:
        """The buffer of a second norm of the stream, for experts parallel to a feed-forward that reads the first."""
        return self._get(input_format, cols, self._tokens, "parallel")

    def shared(self, input_format: InputFormat, cols: int) -> ActivationBuffer:
        """The buffer of the activations of shared experts, which experts beside them leave as they are."""
        return self._get(input_format, cols, self._tokens, "shared")

    def _get(self, input_format: InputFormat, cols: int, tokens: int, of: str) -> ActivationBuffer:
        key = input_format, cols, tokens, of
        if key not in self._made:
            most = most_tokens(input_format.block_tokens) if input_format.kind == "half" else None
            self._made[key] = make_buffer(input_format, cols, min(tokens, most or tokens), self._device)
        return self._made[key]

    @property
    def size_bytes(self) -> int:
        return sum(
            tensor.numel() * tensor.element_size()
            for made in self._made.values()
            for tensor in (made.values, made.scales, made.codes, made.terms)
        )


def make_buffer(input_format: InputFormat, cols: int, tokens: int, device: torch.device) -> ActivationBuffer:
    """A buffer of zeros, for so many tokens and up to the end of their last block, which no scale changes."""
    padded = -(-cols // CHUNK) * CHUNK
    tokens = -(-tokens // input_format.block_tokens) * input_format.block_tokens
    none = torch.zeros(1, device=device)

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    if input_format.kind == "int8":
        codes, terms = zeros(tokens, padded, dtype=torch.int8), zeros(tokens, padded // 16, 2)
        return ActivationBuffer(input_format, cols, none, none, codes, terms)
    shape: tuple[int, ...] = tokens, cols
    block = input_format.block_tokens
    run = min(block, 8)
    if input_format.kind == "fp8":
        blocks, groups = tokens // block, -(-padded // 128)
        codes = zeros(blocks, 2 * groups, 4, block // run, run, 16, dtype=torch.uint8)
        return ActivationBuffer(input_format, cols, none, none, codes, zeros(blocks, groups, block))
    if input_format.kind == "half":
        shape = tokens // block, padded // CHUNK, 8, block // run, run, 8
    values = zeros(*shape, dtype=_DTYPES[input_format.kind])
    return ActivationBuffer(input_format, cols, values, torch.ones(tokens, device=device), none, none)
