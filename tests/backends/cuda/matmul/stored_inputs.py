"""Rows as the mat-vecs of experts read them, and what they mean."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.matmul.experts import FLOATS, INTEGERS
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, ActivationBuffers, FoldedNorm, InputFormat
from realizar.backends.cuda.matmul.quantized import MatmulKernels

DEVICE = torch.device("cuda")
Array = NDArray[np.float64]


def stored(values: Array, kind: str) -> tuple[ActivationBuffer, Array]:
    """Rows as a stack's kernel reads them, and the numbers that are then in them."""
    x = torch.from_numpy(values.astype(np.float32)).cuda()
    if kind == "f32":
        buffer = ActivationBuffers(len(values), DEVICE).get(FLOATS, values.shape[1])
        buffer.values[:] = x
        return buffer, x.double().cpu().numpy()
    made = MatmulKernels(DEVICE).written(x, INTEGERS)
    return made, read_integers(made)


def integers(codes: torch.Tensor, terms: torch.Tensor, norm: FoldedNorm | None = None) -> ActivationBuffer:
    none = torch.zeros(1, device=codes.device)
    return ActivationBuffer(INTEGERS, codes.shape[1], none, none, codes, terms, norm)


def halves(values: torch.Tensor, scales: torch.Tensor, norm: FoldedNorm | None = None) -> ActivationBuffer:
    none, (_, chunks, _, eights, _, _) = torch.zeros(1, device=values.device), values.shape
    return ActivationBuffer(InputFormat("half", 8 * eights), 64 * chunks, values, scales, none, none, norm)


def read_integers(buffer: ActivationBuffer) -> Array:
    codes, terms = buffer.codes.double().cpu().numpy(), buffer.terms.double().cpu().numpy()
    return (codes.reshape(len(codes), -1, 16) * terms[:, :, :1]).reshape(len(codes), -1)[:, : buffer.cols]


def near(found: NDArray[np.floating], expected: Array, limit: float) -> None:
    assert np.linalg.norm(found - expected) <= limit * np.linalg.norm(expected)
