"""`FP8Copy`: packed matrices copied as 8-bit floats, for steps of many tokens. torch only; off unless asked for.

A step of a few hundred tokens is bound by arithmetic, which the tensor cores do twice as fast in FP8 (e4m3) as in
halves. The price is fidelity: 3 mantissa bits in weights and activations are about 3.7 % error of a matmul against
0.5 % of int8 per 16, so that logits lie far outside of the gates that everything else keeps. And memory: a byte a
weight beside the packed matrices, which smaller steps go on reading.

Weights have one float32 scale per output feature, activations one per token, 448 being the largest value of both.
`kernels.store_inputs` writes the activations; the matmul is cuBLAS's or CUTLASS's, whichever torch takes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.layouts.activations import CHUNK, half_order
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat, make_buffer
from realizar.backends.cuda.matmul.quantized import MatmulConfig, MatmulKernels
from realizar.backends.cuda.weights.load import Matrix
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.errors import InvalidRequestError, UnsupportedModelError

_LOG = logging.getLogger(__name__)
LEAST_TOKENS = 128
"""Tokens of a step from which on copies are read."""
LEAST_CAPABILITY = (8, 9)
FP8_INPUT = InputFormat("fp8")
LARGEST = 448.0  # of e4m3
_MULTIPLE = 16  # of output features and columns, as cuBLAS wants them
_COLUMNS = 128  # dequantised at once
_SMALLEST = 1e-30  # an output feature's largest weight counts as at least that: a scale's inverse stays finite


@dataclass(frozen=True, slots=True)
class FP8Copy:
    """Matrices one below the other: codes float8_e4m3fn [out_features, cols], scales float32 [out_features]."""

    codes: torch.Tensor
    scales: torch.Tensor
    out: torch.dtype

    def multiply(self, x: ActivationBuffer, tokens: int, partials: torch.Tensor) -> None:
        """Write float32 partials [1, tokens, out_features] of the tokens in `x`, in the format `FP8_INPUT`."""
        scaled_matmul(x.values[:tokens], x.scales[:tokens], self.codes, self.scales, self.out, partials[0])


def scaled_matmul(
    x: torch.Tensor, x_scales: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, out: torch.dtype,
    sums: torch.Tensor,
) -> None:  # fmt: skip
    """Write sums [tokens, outputs] = (x * x_scales) @ (weights * scales).T; codes as bytes or as 8-bit floats.

    `out` is the type that torch's matmul writes; where `sums` has another, they are copied.
    """
    x, weights = x.view(torch.float8_e4m3fn), weights.view(torch.float8_e4m3fn)
    operands = x, weights.t(), x_scales[:, None], scales[None]
    if out == sums.dtype:
        torch._scaled_mm(*operands, out_dtype=out, use_fast_accum=True, out=sums)
    else:
        sums.copy_(torch._scaled_mm(*operands, out_dtype=out, use_fast_accum=True))


def check_device(device: DeviceProfile) -> None:
    """Raise InvalidRequestError for a GPU without FP8."""
    if not device.runs("matmuls") or device.capability < LEAST_CAPABILITY:
        major, minor = device.capability
        raise InvalidRequestError(
            f"fp8_copies needs an NVIDIA GPU of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or"
            f" more; {device.name} has {major}.{minor}",
            "fp8_copies",
        )


def sum_type(device: DeviceProfile) -> torch.dtype:
    """The type in which matmuls with a scale per token give their sums here: float32 where torch can, else bfloat16.

    Raises UnsupportedModelError where they run in neither.
    """
    ones = torch.ones((256, 256), device=device.torch_device).to(torch.float8_e4m3fn)
    scales = torch.full((256,), 0.5, device=device.torch_device)
    reason = ""
    for out in (torch.float32, torch.bfloat16):
        sums = torch.zeros((256, 256), device=device.torch_device)
        try:
            scaled_matmul(ones[:LEAST_TOKENS], scales[:LEAST_TOKENS], ones, scales, out, sums[:LEAST_TOKENS])
            if bool((sums[:LEAST_TOKENS] == 64.0).all()):
                return out
            reason = "its sums are wrong"
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().split("\n", 1)[0]
        _LOG.debug("FP8 matmuls with sums in %s are not used: %s", out, reason)
    raise UnsupportedModelError(f"torch's FP8 matmul with row scales does not run on {device.name}: {reason}")


def copied_bytes(matrices: Sequence[Matrix]) -> int:
    """Bytes of codes and scales of a copy of matrices that share an input; 0 where they have none.

    All that is quantised and packed is copied, of sizes that FP8 matmuls take.
    """
    packed = [matrix for matrix in matrices if isinstance(matrix, PackedMatrix) and not matrix.format.is_float]
    out_features, cols = sum(matrix.out_features for matrix in packed), packed[0].in_features if packed else 0
    fits = len(packed) == len(matrices) and out_features % _MULTIPLE == 0 and cols % _MULTIPLE == 0
    return out_features * cols + 4 * out_features if fits else 0


def copy_matrices(matmuls: MatmulKernels, matrices: Sequence[PackedMatrix], out: torch.dtype) -> FP8Copy:
    """Copy packed matrices of equal columns, one below the other, each in its own order of output features."""
    out_features, cols = sum(matrix.out_features for matrix in matrices), matrices[0].in_features
    codes = torch.empty((out_features, cols), dtype=torch.float8_e4m3fn, device=matmuls.device)
    scales = torch.empty(out_features, device=matmuls.device)
    first = 0
    for matrix in matrices:
        part = slice(first, first + matrix.out_features)
        tops = torch.full_like(scales[part], _SMALLEST)
        for _, values in _dequantized(matmuls, matrix):
            torch.maximum(tops, values.abs().amax(dim=0), out=tops)
        torch.div(tops, LARGEST, out=scales[part])
        for at, values in _dequantized(matmuls, matrix):
            codes[part, at : at + len(values)].copy_((values / scales[part]).t())
        first += matrix.out_features
    return FP8Copy(codes, scales, out)


def prepare_copying(matmuls: MatmulKernels, matrices: Sequence[PackedMatrix]) -> None:
    matmuls.prepare([(matrix.format, _unpacking(matmuls, matrix)) for matrix in matrices])


def _unpacking(matmuls: MatmulKernels, matrix: PackedMatrix) -> MatmulConfig:
    return replace(matmuls.route(_COLUMNS, matrix), dependent=False)


def _dequantized(matmuls: MatmulKernels, matrix: PackedMatrix) -> Iterator[tuple[int, torch.Tensor]]:
    """First column, and float32 [columns, out_features]: matmuls with rows of the identity, which every format has."""
    config, cols = _unpacking(matmuls, matrix), matrix.format.chunks(matrix.in_features) * CHUNK
    identity = half_order(np.eye(_COLUMNS, dtype=np.float16), config.format.block_tokens)
    ones = torch.from_numpy(identity).to(matmuls.device)
    source = make_buffer(config.format, cols, _COLUMNS, matmuls.device)
    sums = torch.empty((config.splits, _COLUMNS, matrix.out_features), device=matmuls.device)
    step = _COLUMNS // CHUNK
    for chunk in range(0, -(-matrix.in_features // CHUNK), step):
        place = source.values[:, chunk : chunk + step]
        place.copy_(ones[:, : place.shape[1]])
        matmuls.launch(matrix, source, sums, _COLUMNS, config)
        place.zero_()
        first = chunk * CHUNK
        yield first, sums.sum(dim=0)[: matrix.in_features - first]
