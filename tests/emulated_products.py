"""CUDA products in plain torch, so that a machine without a GPU runs all that lies around them.

They read activations in the products' own formats, finish a deferred norm, and write two splits. Buffers of partial
sums beyond their place stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from realizar.backends.cuda import bind_decode, runner, weights
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.pack import PackedMatrix
from realizar.backends.cuda.pack_activations import half_positions, padded_cols
from realizar.backends.cuda.pack_raw import RawMatrix
from realizar.backends.cuda.products import ActivationFormat, Activations, Int8Activations, ProductConfig
from realizar.quantization import dequantize

SPLITS = 2


def decoded(activations: Activations, rows: int, cols: int) -> torch.Tensor:
    """float64 [rows, cols]: what a product multiplies by, its deferred norm applied."""
    if isinstance(activations, Int8Activations):
        scales = activations.terms[:rows, :, 0].double().repeat_interleave(16, dim=1)
        x = activations.codes[:rows].double() * scales
    else:
        values, place = activations.values, torch.from_numpy(half_positions(padded_cols(cols)))
        block_rows, m = values.shape[3] * 8, torch.arange(rows)[:, None]
        chunk = (torch.arange(padded_cols(cols)) // 64)[None]
        x = values[m // block_rows, chunk, place[None, :, 0], m % block_rows // 8, m % 8, place[None, :, 1]].double()
        x = x * activations.row_scales[:rows, None].double()
    norm = activations.norm
    if norm is not None:
        x = x / torch.sqrt(norm.squares[:rows].double().sum(1, keepdim=True) / norm.width + norm.eps)
    return x[:, :cols]


class EmulatedPacker:
    """Keeps matrices as float64."""

    def __init__(self, device: torch.device | str) -> None:
        pass

    def pack(
        self, parts: Sequence[RawMatrix], into: torch.Tensor | None = None,
        uploaded: Callable[[int], None] | None = None, interleaved: bool = False,
    ) -> PackedMatrix:  # fmt: skip
        assert not interleaved, "parts lie one below the other here"
        dense = [dequantize(part.ggml_type, part.data, part.rows, part.cols) for part in parts]
        rows = sum(part.rows for part in parts)
        values = torch.from_numpy(np.concatenate(dense).astype(np.float64))
        return PackedMatrix(rows, parts[0].cols, None, values, torch.zeros(1), None)  # type: ignore[arg-type]


class EmulatedProducts:
    """`Products` over matrices of an `EmulatedPacker`.

    Attributes:
        norms: of each launch so far, whether it finished a norm.
    """

    def __init__(self, device: torch.device | str = "cpu", batch_invariant: bool = False) -> None:
        self.norms: list[bool] = []

    def activation_format(self, rows: int) -> ActivationFormat:
        return ActivationFormat("int8", 1) if rows <= 2 else ActivationFormat("half", 8 if rows <= 8 else 16)

    def route_merged(self, rows: int, matrices: Sequence[PackedMatrix]) -> list[ProductConfig]:
        return [ProductConfig(None, self.activation_format(rows), SPLITS) for _ in matrices]  # type: ignore[arg-type]

    def prepare(self, wanted: Any, compiled: Any = None) -> None:
        pass

    def launch_merged(
        self, matrices: Sequence[PackedMatrix], activations: Activations, partials: torch.Tensor, rows: int,
        config: ProductConfig,
    ) -> None:  # fmt: skip
        column = 0
        for matrix in matrices:
            self.launch(matrix, activations, partials, rows, config, column=column)
            column += matrix.rows
        self.norms.append(activations.norm is not None)

    def launch(
        self, matrix: PackedMatrix, activations: Activations, partials: torch.Tensor, rows: int, config: ProductConfig,
        column: int = 0,
    ) -> None:  # fmt: skip
        x, half = decoded(activations, rows, matrix.cols), matrix.cols // 2
        for split, part in enumerate((slice(0, half), slice(half, None))):
            sums = x[:, part] @ matrix.weights[:, part].T
            partials[split, :rows, column : column + matrix.rows] = sums.float()


def emulate_products(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedProducts]:
    """Let backends loaded from here on have these products; they are noted in the list."""
    made: list[EmulatedProducts] = []

    def make(device: Any, batch_invariant: bool) -> EmulatedProducts:
        made.append(EmulatedProducts(device, batch_invariant))
        return made[-1]

    monkeypatch.setattr(DeviceProfile, "has_cuda_kernels", property(lambda _: True))
    monkeypatch.setattr(DeviceProfile, "has_dependent_launch", property(lambda _: False))
    monkeypatch.setattr(runner, "Products", make)
    monkeypatch.setattr(weights, "Packer", EmulatedPacker)
    monkeypatch.setattr(bind_decode, "DecodeAttention", lambda _: None)
    return made
