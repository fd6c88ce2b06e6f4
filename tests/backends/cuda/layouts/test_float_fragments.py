"""Float weights in fragment order: where each lies, what is rounded, and torch's packing beside numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="torch is not installed")

import torch

from realizar.backends.cuda.layouts.fragments import FLOATS, fragment_floats, fragment_format, pack_fragments
from realizar.backends.cuda.weights.pack_raw import reorder_e4m3, reorder_floats
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization.float_tensors import e4m3_layout
from realizar.quantization.ggml_layouts import GGML_LAYOUTS
from realizar.quantization.planes import Planes


def random_floats(out_features: int, cols: int, seed: int = 0) -> NDArray[np.float32]:
    """bf16 values of many sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(-4, 2, (out_features, 1)))
    values = (rng.standard_normal((out_features, cols)) * sizes).astype(np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def weight(data: NDArray[np.uint8], block_scales: NDArray[np.float32], cols: int, row: int, col: int) -> float:
    """One weight, by the words of the layout's description."""
    strip, tile, half, g = row // 64, row % 64 // 16, row % 16 // 8, row % 8
    chunk, t, step, own = col // 64, col % 64 // 16, col % 16 // 4, col % 4
    pair, place = 2 * (own % 2) + half, own // 2
    lane = 4 * g + t
    at = (strip * FLOATS.chunks(cols) + chunk) * 8192 + ((tile * 4 + step) * 32 + lane) * 16 + pair * 4 + place * 2
    return float(data[at : at + 2].view(np.float16)[0]) * float(block_scales[strip])


@pytest.mark.parametrize(("out_features", "cols"), [(64, 64), (150, 200), (16, 320)])
def test_every_weight_has_its_place(out_features: int, cols: int) -> None:
    values = random_floats(out_features, cols)
    data, block_scales = fragment_floats(values)
    assert data.size == FLOATS.size_bytes(out_features, cols)
    rng = np.random.default_rng(1)
    for row, col in zip(rng.integers(0, out_features, 400), rng.integers(0, cols, 400), strict=True):
        assert weight(data, block_scales, cols, int(row), int(col)) == values[row, col]
    padding = data.size // 2 - values.size
    assert np.count_nonzero(data.view(np.float16) == 0) >= padding


def test_only_weights_far_smaller_than_their_neighbours_are_rounded() -> None:
    values = np.ones((64, 64), np.float32)
    values[0, :4] = 2.0**-30, 1.0078125 * 2.0**-30, 2.0**-38, 1.5 * 2.0**-41
    data, block_scales = fragment_floats(values)
    assert [weight(data, block_scales, 64, 0, col) for col in range(4)] == [*values[0, :3], 0.0]
    values[1:, 0] = -(2.0**20)
    data, block_scales = fragment_floats(values)
    assert [weight(data, block_scales, 64, *place) for place in ((5, 0), (0, 5), (0, 0))] == [-(2.0**20), 1.0, 0.0]
    assert fragment_floats(np.zeros((64, 64), np.float32))[1].tolist() == [1.0]


def test_the_formats_of_floats() -> None:
    assert fragment_format(GGML_LAYOUTS[GGMLType.BF16]) == fragment_format(GGML_LAYOUTS[GGMLType.F16]) == FLOATS
    assert FLOATS.is_float
    assert (FLOATS.block_bytes, FLOATS.super_bytes, FLOATS.chunks(200)) == (8192, 0, 4)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize(("out_features", "cols"), [(128, 192), (150, 200)])
def test_torch_packs_the_same_bytes(kind: str, out_features: int, cols: int) -> None:
    values = torch.from_numpy(random_floats(out_features, cols, 3)).to(torch.bfloat16 if kind == "bf16" else torch.half)
    data, block_scales = fragment_floats(values.float().numpy())
    strips = len(block_scales)
    weights, scales = torch.zeros((2 * strips, data.size // strips), dtype=torch.uint8), torch.zeros(2 * strips)
    reorder_floats(values, weights[1::2], scales[1::2])
    assert np.array_equal(weights[1::2].numpy().reshape(-1), data)
    assert np.array_equal(scales[1::2].numpy(), block_scales)
    assert not weights[::2].any()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("out_features", "cols"), [(128, 256), (150, 384), (17, 32)])
def test_torch_packs_the_same_numbers_of_eight_bits(group: int, out_features: int, cols: int) -> None:
    """Scales of either sign, far apart, so that some are subnormal halves, and strips without any."""
    rng = np.random.default_rng(4)
    cols = -(-cols // group) * group
    scales = np.ldexp(rng.standard_normal((out_features, cols // group)), rng.integers(-40, 3)).astype(np.float32)
    scales[: out_features // 2] *= rng.choice(np.float32([0, 1e-6, 1]), scales[: out_features // 2].shape)
    scales[64:128] = 0
    codes = rng.integers(0, 256, (out_features, cols), np.uint8)
    layout = e4m3_layout(group)
    data, block_scales = pack_fragments(Planes(layout, codes, scales), fragment_format(layout))
    strips = len(block_scales)
    weights, found = torch.zeros((2 * strips, data.size // strips), dtype=torch.uint8), torch.zeros(2 * strips)
    given = torch.from_numpy(codes), torch.from_numpy(scales)
    reorder_e4m3(*given, fragment_format(layout), weights[1::2], found[1::2])
    assert np.array_equal(weights[1::2].numpy().reshape(-1), data)
    assert np.array_equal(found[1::2].numpy(), block_scales)
    assert not weights[::2].any()
