"""Expected FP8 copies and activations, by torch's own conversion and float64; on the CPU and on GPUs."""

from __future__ import annotations

import numpy as np
import torch

from realizar.backends.cuda.kernels.activate import convert
from realizar.backends.cuda.matmul.fp8_copies import FP8_INPUT, FP8Copy
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, ActivationBuffers
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.parts import Linear
from realizar.models.spec import ModelSpec
from realizar.quantization.block_source import BlockSource, block_source
from realizar.quantization.random_blocks import random_blocks
from reference_model import Array, ReferenceModel
from reference_tensors import load_tensors


class FP8Reference(ReferenceModel):
    """The reference with both operands of every matmul rounded by rows, the head's if `rounded_head`."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint) -> None:
        super().__init__(spec, load_tensors(spec, checkpoint), np.float64)
        self.rounded_head = False

    def _linear(self, linear: Linear, x: Array) -> Array:
        if linear is self.spec.head and not self.rounded_head:
            return super()._linear(linear, x)
        y = rounded(x) @ rounded(self._tensors[linear.weight]).T
        return y if linear.bias is None else y + self._tensors[linear.bias]


def rounded(rows: Array) -> Array:
    """float64 rows with 3 mantissa bits, the largest of each 448 times a scale."""
    scales = np.abs(rows).max(axis=1, keepdims=True) / 448
    return torch.from_numpy(rows / scales).to(torch.float8_e4m3fn).double().numpy() * scales


def row_errors(found: Array, expected: Array) -> Array:
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def raw_matrix(ggml_type: GGMLType, rows: int, cols: int, seed: int) -> BlockSource:
    data = random_blocks(ggml_type, rows, cols, np.random.default_rng(seed), 0.05)
    return block_source(ggml_type, np.ascontiguousarray(data).reshape(-1), rows, cols)


def exact_weights(parts: list[BlockSource], interleaved: bool = False) -> torch.Tensor:
    """float64 [rows, cols], 64 rows of each by turns or one below the other."""
    floats = [part.dequantize().astype(np.float64) for part in parts]
    cols = parts[0].in_features
    if interleaved:
        return torch.from_numpy(np.stack([each.reshape(-1, 64, cols) for each in floats], axis=1).reshape(-1, cols))
    return torch.from_numpy(np.concatenate(floats))


def check_copy(copy: FP8Copy, exact: torch.Tensor, rounding: float) -> None:
    """Scales of the rows' largest values and the nearest codes.

    Args:
        rounding: relative, of what the weights are sums of; those are no more than twice the row's largest weight.
    """
    exact = exact.to(copy.codes.device)
    scales = copy.scales.double()
    assert torch.allclose(scales, exact.abs().amax(dim=1) / 448, rtol=4 * rounding + 1e-6)
    weights = exact / scales[:, None]
    half_a_step = torch.maximum(weights.abs() / 17, torch.full_like(weights, 2.0**-10))
    error = (copy.codes.double() - weights).abs()
    assert bool((error <= half_a_step * (1 + 1e-6) + 1000 * rounding).all())


def awkward_rows(cols: int, device: torch.device) -> torch.Tensor:
    """float32 [8, cols]: normal values, all orders of FP8, zeros, huge, tiny and single ones, a NaN, ones."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((8, cols), generator=generator)
    x[1] = torch.exp2(torch.linspace(-13, 8.8, cols)) * torch.where(torch.arange(cols) % 2 == 0, 1.0, -1.0)
    x[1, 0] = 448.0
    x[2] = 0.0
    x[3] *= 1e30
    x[4] *= 1e-25
    x[5] = 0.0
    x[5, cols - 1] = -3.0
    x[6, 1] = torch.nan
    x[7] = 1.0
    return x.to(device)


def poisoned_rows(rows: int, cols: int, device: torch.device) -> ActivationBuffer:
    buffer = ActivationBuffers(rows, device).get(FP8_INPUT, cols)
    buffer.values.fill_(0x7F)
    buffer.scales.fill_(torch.nan)
    return buffer


def check_rows(buffer: ActivationBuffer, x: torch.Tensor, ulps: int = 0) -> None:
    """The bytes that torch rounds x / scale to, for the scale of each row's largest value; up to `ulps` codes away."""
    largest = torch.where(x.isnan(), 0.0, x).abs().amax(dim=1)
    scales = buffer.scales[: len(x)]
    assert torch.allclose(scales, largest.clamp(min=1e-30) / 448, rtol=1e-6, atol=0.0)
    wanted = (x / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
    found = buffer.values[: len(x)].int()
    assert bool(((found - wanted).abs() <= ulps).all())


def converted(x: torch.Tensor) -> ActivationBuffer:
    """Rows written by the kernel that takes attention's results."""
    rows, cols = x.shape
    buffer, none = poisoned_rows(rows, cols, x.device), torch.zeros(1, dtype=torch.int32, device=x.device)
    block = 1 << (cols - 1).bit_length()
    convert[(rows, 1)](
        x, x.stride(0), cols, *buffer.pointers(), none, none, DEPENDENT=False, BLOCK=block, **buffer.constants()
    )
    return buffer
