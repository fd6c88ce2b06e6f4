"""`Net`, a gated delta net of a layer, and what kernels of recurrences take of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.workspace import Workspace
from realizar.models.mixers import GatedDeltaNet


@dataclass(frozen=True, slots=True)
class Net:
    """A gated delta net with its matmuls: `linear` computes its inputs, `consumer` reads the result.

    Attributes:
        kernel, decay_bias, rate, norm: vectors, float32, `rate` below zero.
        rings, states: of its layer. sizes: constants of its kernels.
    """

    part: GatedDeltaNet
    linear: MergedLinear
    consumer: MergedLinear
    kernel: torch.Tensor
    decay_bias: torch.Tensor
    rate: torch.Tensor
    norm: torch.Tensor
    rings: torch.Tensor
    states: torch.Tensor
    sizes: dict[str, Any]

    @property
    def scale(self) -> float:
        return float(self.part.key_size**-0.5)

    @property
    def eps(self) -> float:
        return float(self.part.norm.eps)


def input_sums(space: Workspace, linear: MergedLinear, kind: StepKind) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and constants of kernels that read a matmul's sums: float32 [splits, tokens, width], and its bias."""
    splits = linear.splits(kind)
    partials = space.partials(splits, kind.tokens, linear.width)
    bias = partials if linear.bias is None else linear.bias
    constants = {"SPLITS": splits, "BIAS": linear.bias is not None, **space.launching(kind)}
    return (partials, partials.stride(0), partials.stride(1), bias), constants


def is_exact(space: Workspace) -> bool:
    """True if a cache of float32 asks for its digits in chunks too."""
    return space.query.dtype == torch.float32
