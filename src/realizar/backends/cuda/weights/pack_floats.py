"""bf16 and fp16 matrices to fragment order, by torch on their device: the bytes of `layouts.float_fragments`."""

from __future__ import annotations

import torch

from realizar.backends.cuda.layouts.float_fragments import ORDER, strip_axes
from realizar.backends.cuda.layouts.fragments import BLOCK, FLOATS
from realizar.quantization.layout import FloatType

FLOAT_TYPES: dict[FloatType, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def reorder_floats(values: torch.Tensor, weights: torch.Tensor, block_scales: torch.Tensor) -> None:
    """Write some strips of a matrix.

    Args:
        values: bf16 or fp16 [out_features, cols].
        weights: uint8 [ceil(out_features / 64), FLOATS.strip_bytes(cols)], whose strips may lie apart.
        block_scales: float32 [ceil(out_features / 64)].
    """
    (out_features, cols), strips = values.shape, len(weights)
    chunks = FLOATS.chunks(cols)
    padded = torch.zeros((strips * BLOCK, chunks * BLOCK), device=values.device)
    padded[:out_features, :cols].copy_(values)
    flat = padded.view(strips, -1)
    tops = flat.abs().amax(dim=1)
    exponents = torch.where(tops > 0, 15 - torch.frexp(tops).exponent, 0).clamp(-100, 100)
    ones = torch.ones_like(tops)
    halves = flat.mul_(torch.ldexp(ones, exponents)[:, None]).half()
    ordered = halves.view(strip_axes(strips, chunks)).permute(ORDER).contiguous()
    weights.copy_(ordered.view(strips, -1).view(torch.uint8))
    block_scales.copy_(torch.ldexp(ones, -exponents))
