"""`FP8Copy`: packed matrices once more as 8-bit floats, for steps of many rows. torch only; off unless asked for.

A step of a few hundred rows and more is bound by arithmetic, which the tensor cores do twice as fast in FP8 (e4m3)
as in halves. The price is fidelity: 3 mantissa bits in weights and activations are about 3.7 % error of a product
against 0.5 % of int8 per 16, so that logits lie far outside of the gates that everything else keeps. And memory: a byte
a weight beside the packed matrices, which smaller steps go on reading.

Weights have one float32 scale per row, activations one per row of the step, 448 being the largest value of both.
`kernels.activation` writes the activations; the product is cuBLAS's or CUTLASS's, whichever torch takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.layouts.activations import CHUNK, half_activations
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, Form
from realizar.backends.cuda.matmul.quantized import HalfActivations, ProductConfig, Products
from realizar.backends.cuda.weights.pack import PackedMatrix
from realizar.errors import InvalidRequestError, UnsupportedModelError

_LOG = logging.getLogger(__name__)
LEAST_ROWS = 128
"""Rows of a step from which on copies are read."""
LEAST_CAPABILITY = (8, 9)
FORM = Form("fp8")
LARGEST = 448.0  # of e4m3
_MULTIPLE = 16  # of rows and columns, as cuBLAS wants them
_COLUMNS = 128  # dequantised at once
_SMALLEST = 1e-30  # the largest value of a row counts as at least that: a scale's inverse stays finite


@dataclass(frozen=True, slots=True)
class FP8Copy:
    """Matrices [rows, cols], one below the other.

    Attributes:
        codes: float8_e4m3fn [rows, cols]. scales: float32 [rows], what codes are multiplied by.
        out: type of sums that the product can write.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    out: torch.dtype

    def multiply(self, x: ActivationBuffer, rows: int, partials: torch.Tensor) -> None:
        """Write float32 partials [1, rows, self.rows] of the rows in `x`, which has the form `FORM`."""
        multiply_rows(x.values[:rows], x.scales[:rows], self.codes, self.scales, self.out, partials[0])


def multiply_rows(
    x: torch.Tensor, x_scales: torch.Tensor, weights: torch.Tensor, scales: torch.Tensor, out: torch.dtype,
    sums: torch.Tensor,
) -> None:  # fmt: skip
    """Write sums [rows, outputs] = (x * x_scales) @ (weights * scales).T; codes as bytes or as 8-bit floats.

    Args:
        out: type that torch's product writes; where `sums` has another, they are copied.
    """
    x, weights = x.view(torch.float8_e4m3fn), weights.view(torch.float8_e4m3fn)
    operands = x, weights.t(), x_scales[:, None], scales[None]
    if out == sums.dtype:
        torch._scaled_mm(*operands, out_dtype=out, use_fast_accum=True, out=sums)
    else:
        sums.copy_(torch._scaled_mm(*operands, out_dtype=out, use_fast_accum=True))


def check_device(device: DeviceProfile) -> None:
    """Refuse a card without FP8.

    Raises:
        InvalidRequestError: it has none.
    """
    if not device.has_cuda_kernels or device.capability < LEAST_CAPABILITY:
        major, minor = device.capability
        raise InvalidRequestError(
            f"fp8_copies needs an NVIDIA card of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or"
            f" more; {device.name} has {major}.{minor}",
            "fp8_copies",
        )


def sum_type(device: DeviceProfile) -> torch.dtype:
    """The type in which products by rows give their sums here: float32 where torch can, else bfloat16.

    Raises:
        UnsupportedModelError: they run in neither.
    """
    ones = torch.ones((256, 256), device=device.torch_device).to(torch.float8_e4m3fn)
    scales = torch.full((256,), 0.5, device=device.torch_device)
    reason = ""
    for out in (torch.float32, torch.bfloat16):
        sums = torch.zeros((256, 256), device=device.torch_device)
        try:
            multiply_rows(ones[:LEAST_ROWS], scales[:LEAST_ROWS], ones, scales, out, sums[:LEAST_ROWS])
            if bool((sums[:LEAST_ROWS] == 64.0).all()):
                return out
            reason = "its sums are wrong"
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().split("\n", 1)[0]
        _LOG.debug("no FP8 products with sums in %s: %s", out, reason)
    raise UnsupportedModelError(f"torch's FP8 product with scales by rows does not run on {device.name}: {reason}")


def is_copied(rows: int, cols: int) -> bool:
    """Whether matrices of so many rows together have a copy."""
    return rows % _MULTIPLE == 0 and cols % _MULTIPLE == 0


def copy_bytes(rows: int, cols: int) -> int:
    """Of codes and scales."""
    return rows * cols + 4 * rows


def copy_matrices(products: Products, matrices: Sequence[PackedMatrix], out: torch.dtype) -> FP8Copy:
    """Copy packed matrices of equal columns, one below the other, each in its own order of rows.

    Args:
        out: from `sum_type`.
    """
    rows, cols = sum(matrix.rows for matrix in matrices), matrices[0].cols
    codes = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=products.device)
    scales = torch.empty(rows, device=products.device)
    first = 0
    for matrix in matrices:
        part = slice(first, first + matrix.rows)
        tops = torch.full_like(scales[part], _SMALLEST)
        for _, values in _dequantized(products, matrix):
            torch.maximum(tops, values.abs().amax(dim=0), out=tops)
        torch.div(tops, LARGEST, out=scales[part])
        for at, values in _dequantized(products, matrix):
            codes[part, at : at + len(values)].copy_((values / scales[part]).t())
        first += matrix.rows
    return FP8Copy(codes, scales, out)


def prepare_copying(
    products: Products, matrices: Sequence[PackedMatrix], compiled: Callable[[int, int], None] | None = None
) -> None:
    """Compile what `copy_matrices` needs for these matrices, side by side."""
    products.prepare([(matrix.format, _unpacking(products, matrix)) for matrix in matrices], compiled)


def _unpacking(products: Products, matrix: PackedMatrix) -> ProductConfig:
    return replace(products.route(_COLUMNS, matrix), dependent=False)


def _dequantized(products: Products, matrix: PackedMatrix) -> Iterator[tuple[int, torch.Tensor]]:
    """First column, and float32 [columns, rows]: products with rows of the identity, which every format has."""
    config, chunks = _unpacking(products, matrix), matrix.format.chunks(matrix.cols)
    block_rows, device = config.format.block_rows, products.device
    identity, _ = half_activations(np.eye(_COLUMNS, dtype=np.float32), block_rows)
    ones = torch.from_numpy(identity).to(device)
    values = torch.zeros((len(ones), chunks, *ones.shape[2:]), dtype=ones.dtype, device=device)
    row_scales = torch.ones(len(ones) * block_rows, device=device)
    sums = torch.empty((config.splits, _COLUMNS, matrix.rows), device=device)
    step = _COLUMNS // CHUNK
    for chunk in range(0, -(-matrix.cols // CHUNK), step):
        place = values[:, chunk : chunk + step]
        place.copy_(ones[:, : place.shape[1]])
        products.launch(matrix, HalfActivations(values, row_scales), sums, _COLUMNS, config)
        place.zero_()
        first = chunk * CHUNK
        yield first, sums.sum(dim=0)[: matrix.cols - first]
