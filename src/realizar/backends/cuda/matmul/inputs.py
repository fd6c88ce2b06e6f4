"""Inputs of matmuls on the device: buffers of each format, one per number of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from realizar.backends.cuda.kernels import store_inputs as formats

CHUNK = 64  # columns of a chunk of the matmuls' own formats

InputKind = Literal["f32", "bf16", "f16", "int8", "half", "fp8"]

_CODES = {
    "f32": formats.PLAIN, "bf16": formats.PLAIN, "f16": formats.SCALED, "int8": formats.INT8, "half": formats.HALF,
    "fp8": formats.FP8,
}  # fmt: skip
_DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "half": torch.float16, "fp8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InputFormat:
    """The format of an activation.

    Attributes:
        kind: token after token in a type (`f16` with a power of two per token, `fp8` with a scale), or one of the CUDA
            matmuls' formats.
        block_tokens: tokens of a block of `half`.
    """

    kind: InputKind
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class ActivationBuffer:
    """Memory for the tokens of a step in one format.

    Attributes:
        values: [tokens, cols], of `fp8` its bytes; or float16 in the order of `layouts.activations`.
        scales: float32 [tokens], the divisor of each token.
        codes, terms: of `int8`.
    """

    format: InputFormat
    cols: int
    values: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor
    terms: torch.Tensor

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

    def beside(self, input_format: InputFormat, cols: int) -> ActivationBuffer:
        """The buffer of a second norm of the stream, for experts beside a dense feed-forward that reads the first."""
        return self._get(input_format, cols, self._tokens, "beside")

    def shared(self, input_format: InputFormat, cols: int) -> ActivationBuffer:
        """The buffer of the activations of shared experts, which experts beside them leave as they are."""
        return self._get(input_format, cols, self._tokens, "shared")

    def _get(self, input_format: InputFormat, cols: int, tokens: int, of: str) -> ActivationBuffer:
        key = input_format, cols, tokens, of
        if key not in self._made:
            self._made[key] = self._make(input_format, cols, tokens)
        return self._made[key]

    @property
    def size_bytes(self) -> int:
        return sum(
            tensor.numel() * tensor.element_size()
            for made in self._made.values()
            for tensor in (made.values, made.scales, made.codes, made.terms)
        )

    def _make(self, input_format: InputFormat, cols: int, tokens: int) -> ActivationBuffer:
        padded = -(-cols // CHUNK) * CHUNK
        tokens = -(-tokens // input_format.block_tokens) * input_format.block_tokens
        none = torch.zeros(1, device=self._device)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        if input_format.kind == "int8":
            codes, terms = zeros(tokens, padded, dtype=torch.int8), zeros(tokens, padded // 16, 2)
            return ActivationBuffer(input_format, cols, none, none, codes, terms)
        dtype = _DTYPES[input_format.kind]
        if input_format.kind == "half":
            values = zeros(
                tokens // input_format.block_tokens,
                padded // CHUNK,
                8,
                input_format.block_tokens // 8,
                8,
                8,
                dtype=dtype,
            )
        else:
            values = zeros(tokens, cols, dtype=dtype)
        return ActivationBuffer(input_format, cols, values, zeros(tokens) + 1.0, none, none)
