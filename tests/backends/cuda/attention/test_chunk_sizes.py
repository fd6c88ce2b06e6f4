"""Which layers' chunks CUDA C++ attends, and how many tokens a tile then has."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.device import DeviceProfile  # noqa: E402
from realizar.backends.cuda.kernel_sizes import native_rows, tile_tokens  # noqa: E402
from realizar.backends.cuda.native.chunks.source import AttendChunkKernel  # noqa: E402

HOPPER = DeviceProfile(torch.device("meta"), "an H200", (9, 0), 132, 1 << 37, 227 << 10)
AMPERE = replace(HOPPER, name="an A100", capability=(8, 0), shared_bytes=163 << 10)
SMALLER = replace(HOPPER, name="an RTX 4090", capability=(8, 9), shared_bytes=99 << 10)
OTHERS = [
    replace(HOPPER, capability=(7, 5)),
    replace(HOPPER, capability=(10, 0)),
    replace(HOPPER, without=frozenset({"attention"})),
]


@pytest.mark.parametrize(
    ("recipe", "on_hopper", "of_int8", "on_ampere", "elsewhere"),
    [
        (Recipe(64, 8, 2), 48, 32, 32, 32),
        # One KV head has eight queries.
        (Recipe(64, 8, 2, windows=(None,) * 2, full_head_size=128), 16, 16, 16, 16),
        (Recipe(80, 6, 2), 42, 42, 42, 42),
        (Recipe(128, 8, 8), 128, 128, 128, 128),
        (Recipe(256, 8, 2), 32, 32, 32, 16),
        (Recipe(256, 8, 8, full_head_size=512), 8, 8, 8, 8),
        (Recipe(32, 8, 2), 32, 32, 32, 32),
    ],
)
def test_tiles_are_as_large_as_every_layers_kernel_takes(
    recipe: Recipe, on_hopper: int, of_int8: int, on_ampere: int, elsewhere: int
) -> None:
    spec, _ = random_model(recipe)
    assert tile_tokens(spec, "bf16", HOPPER, fixed=False) == tile_tokens(spec, "f16", HOPPER, fixed=False) == on_hopper
    assert tile_tokens(spec, "int8", HOPPER, fixed=False) == tile_tokens(spec, "fp8", HOPPER, fixed=False) == of_int8
    for given_up in (AMPERE, replace(HOPPER, without=frozenset({"wgmma"}))):
        assert tile_tokens(spec, "bf16", given_up, fixed=False) == on_ampere
        assert tile_tokens(spec, "int8", given_up, fixed=False) == elsewhere
    for kv_dtype in ("bf16", "int8", "fp8"):
        for device in (SMALLER, *OTHERS):
            assert tile_tokens(spec, kv_dtype, device, fixed=False) == elsewhere
    wide = recipe.head_size > 256 or (recipe.full_head_size or 0) > 256
    assert tile_tokens(spec, "bf16", HOPPER, fixed=True) == (elsewhere if wide else on_hopper)


def test_a_tile_fits_its_layers_kernel() -> None:
    """Of any mixture of head sizes and groups, also where a KV head has more queries than a tile has rows."""
    shapes = [(64, 8, 2), (64, 71, 1), (64, 200, 1), (96, 130, 1), (128, 5, 1), (192, 2, 2), (256, 16, 1), (512, 8, 1)]
    for first in shapes:
        for second in shapes:
            spec, _ = random_model(Recipe(*first, windows=(None,)))
            other, _ = random_model(Recipe(*second, windows=(None,)))
            spec = replace(spec, layers=spec.layers + other.layers)
            for kv_dtype in ("bf16", "int8", "fp8"):
                tokens = tile_tokens(spec, kv_dtype, HOPPER, fixed=False)
                for _, attention in spec.all_attentions():
                    group = attention.num_heads // attention.num_kv_heads
                    rows = native_rows(attention, kv_dtype, HOPPER, fixed=False)
                    assert rows == 0 or tokens * group <= rows
                if rows:
                    kernel = AttendChunkKernel(attention.head_size, group, tokens, "bf16", 32)
                    assert kernel.slots >= 3
                    assert kernel.shared_bytes <= 224 << 10
