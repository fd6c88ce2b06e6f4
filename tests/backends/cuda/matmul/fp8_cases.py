"""8-bit floats as matmuls read them, by torch's own conversion, and float64; on the CPU and on GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from realizar.backends.cuda.kernels.activate import convert
from realizar.backends.cuda.matmul.fp8 import FP8_INPUT
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat, make_buffer
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.parts import Linear
from realizar.models.spec import ExpertLinear, ModelSpec
from realizar.quantization.float_tensors import e4m3_layout
from realizar.quantization.planes import Planes
from realizar.quantization.source import PlanesSource
from reference_model import Array, ReferenceModel
from reference_tensors import load_tensors

BLOCK, GROUP = FP8_INPUT.block_tokens, 128
LARGEST = 448.0


class FP8Reference(ReferenceModel):
    """The reference with the activations of every matmul but the head's and the routers' rounded to e4m3."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint) -> None:
        super().__init__(spec, load_tensors(spec, checkpoint), np.float64)
        self._exact = {spec.head, *(one.router for _, one in spec.mixtures())}

    def _linear(self, linear: Linear, x: Array) -> Array:
        return super()._linear(linear, x if linear in self._exact else _rounded(x))

    def _expert_linear(self, stack: ExpertLinear, expert: int, x: Array) -> Array:
        return super()._expert_linear(stack, expert, _rounded(x))


def _rounded(x: Array) -> Array:
    rounded: Array = FP8Values.of(torch.from_numpy(x.astype(np.float32))).floats().numpy()
    return rounded


@dataclass(frozen=True, slots=True)
class FP8Values:
    """Tokens in 8-bit floats, in plain order.

    Attributes:
        codes: float8_e4m3fn [tokens, groups, 128]. scales: float32 [tokens, groups].
        cols: columns of a token, after which there are zeros.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    cols: int

    @staticmethod
    def of(x: torch.Tensor) -> FP8Values:
        """float32 [tokens, cols] rounded."""
        tokens, cols = x.shape
        padded = torch.zeros((tokens, -(-cols // GROUP) * GROUP), device=x.device)
        padded[:, :cols] = x
        groups = padded.view(tokens, -1, GROUP)
        largest = torch.where(groups.isnan(), 0.0, groups).abs().amax(2)
        scales = largest.clamp(min=1e-30) / LARGEST
        codes = (groups / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return FP8Values(codes, scales, cols)

    @staticmethod
    def read(codes: torch.Tensor, scales: torch.Tensor, tokens: int, cols: int) -> FP8Values:
        """Those of a buffer: uint8 [blocks, chunks, 4, runs, run, 16] and float32 [blocks, groups, runs * run]."""
        blocks, chunks, _, runs, run, _ = codes.shape
        split = codes.view(blocks, 4 * chunks, runs, run, 16).permute(0, 2, 3, 1, 4)
        plain = split.reshape(blocks * runs * run, chunks // 2, GROUP)[:tokens]
        order = _scale_order(runs * run)
        by_token = scales[:, :, order].permute(0, 2, 1).reshape(blocks * runs * run, -1)
        return FP8Values(plain.contiguous().view(torch.float8_e4m3fn), by_token[:tokens], cols)

    def floats(self) -> torch.Tensor:
        """float64 [tokens, cols]."""
        return (self.codes.double() * self.scales.double()[..., None]).flatten(1)[:, : self.cols]

    def buffer(self, of: InputFormat = FP8_INPUT) -> ActivationBuffer:
        """In the order in which kernels read them; places that nobody writes have zeros."""
        tokens, groups, _ = self.codes.shape
        made = make_buffer(of, self.cols, tokens, self.codes.device)
        blocks, _, _, runs, run, _ = made.codes.shape
        plain = torch.zeros((blocks * runs * run, groups * GROUP), dtype=torch.uint8, device=self.codes.device)
        plain[:tokens] = self.codes.view(torch.uint8).flatten(1)
        split = plain.view(blocks, runs, run, 8 * groups, 16).permute(0, 3, 1, 2, 4)
        made.codes.copy_(split.reshape(made.codes.shape))
        scales = torch.zeros((blocks * runs * run, groups), device=self.codes.device)
        scales[:tokens] = self.scales
        made.terms[:, :, _scale_order(runs * run)] = scales.view(blocks, runs * run, groups).permute(0, 2, 1)
        return made


def _scale_order(block: int) -> list[int]:
    """Where the scales of a block's tokens lie."""
    return [r // 16 * 16 + r % 8 // 2 * 4 + r % 16 // 8 * 2 + r % 2 for r in range(block)]


SHARES = "block", "tensor", "feature", "own"
Share = Literal["block", "tensor", "feature", "own"]
"""What numbers of eight bits that have a scale in common are of; `own`: an output feature's by 128 columns."""


def e4m3_source(share: str, out_features: int, cols: int, rng: np.random.Generator) -> PlanesSource:
    group = next(each for each in (128, 64, 32) if cols % each == 0)
    numbers = torch.from_numpy(rng.standard_normal((out_features, cols)).astype(np.float32) * 80).clamp(-448, 448)
    codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    rows = {"block": 128, "tensor": out_features}.get(share, 1)
    blocks = -(-out_features // rows), 1 if share in ("tensor", "feature") else -(-cols // 128)
    scales = rng.uniform(0.5, 1.5, blocks).astype(np.float16).astype(np.float32) / 2048
    places = np.arange(out_features)[:, None] // rows, np.arange(0, cols, group) // 128 % blocks[1]
    return PlanesSource(e4m3_layout(group), Planes(e4m3_layout(group), codes, scales[places]))


def row_errors(found: Array, expected: Array) -> Array:
    return np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)


def awkward_rows(cols: int, device: torch.device) -> torch.Tensor:
    """float32 [8, cols]: normal values, all orders of FP8, zeros, huge, tiny and single ones, a NaN, ones."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((8, cols), generator=generator)
    x[1] = torch.exp2(torch.linspace(-13, 8.8, cols)) * torch.where(torch.arange(cols) % 2 == 0, 1.0, -1.0)
    x[1, 0] = LARGEST
    x[2] = 0.0
    x[3] *= 1e30
    x[4] *= 1e-25
    x[5] = 0.0
    x[5, cols - 1] = -3.0
    x[6, 1] = torch.nan
    x[7] = 1.0
    return x.to(device)


def poisoned(tokens: int, cols: int, device: torch.device, of: InputFormat = FP8_INPUT) -> ActivationBuffer:
    """A buffer of codes of NaN up to the end of the columns' chunk, and of zeros in a chunk that nobody writes."""
    buffer = make_buffer(of, cols, tokens, device)
    buffer.codes[:, : -(-cols // 64)] = 0x7F
    buffer.terms.fill_(torch.nan)
    return buffer


def check_tokens(buffer: ActivationBuffer, x: torch.Tensor, ulps: int = 0) -> None:
    """The bytes that torch rounds x / scale to, for the scale of each 128 columns; up to `ulps` codes away."""
    wanted, found = FP8Values.of(x), FP8Values.read(buffer.codes, buffer.terms, len(x), x.shape[1])
    assert torch.allclose(found.scales, wanted.scales, rtol=1e-6, atol=0.0)
    beside = (found.codes.view(torch.uint8).int() - wanted.codes.view(torch.uint8).int()).abs()
    assert bool((beside <= ulps).all())


def converted(x: torch.Tensor, of: InputFormat = FP8_INPUT) -> ActivationBuffer:
    """Tokens written by the kernel that takes attention's results."""
    tokens, cols = x.shape
    buffer, none = poisoned(tokens, cols, x.device, of), torch.zeros(1, dtype=torch.int32, device=x.device)
    convert[(tokens, -(-cols // 256))](
        x, x.stride(0), cols, *buffer.pointers(), none, none, DEPENDENT=False, BLOCK=256, **buffer.constants()
    )
    return buffer
