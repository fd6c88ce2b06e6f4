"""The two formats of activations against their description, element by element."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from backends.cuda.layouts.activation_values import half_activations, half_positions, int8_activations
from realizar.backends.cuda.layouts.activations import padded_cols


@pytest.mark.parametrize(
    ("rows", "cols", "block_tokens"), [(7, 160, 1), (1, 64, 8), (13, 160, 8), (5, 96, 16), (70, 128, 64)]
)
def test_half_format_places_every_element(rows: int, cols: int, block_tokens: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, cols)).astype(np.float32)
    values, scales = half_activations(x, block_tokens)
    run = min(block_tokens, 8)
    assert values.shape == (-(-rows // block_tokens), padded_cols(cols) // 64, 8, block_tokens // run, run, 8)
    assert (scales == 1).all()
    places = half_positions(cols)
    seen = np.zeros(values.shape, dtype=bool)
    for m in range(rows):
        for c in range(cols):
            d = c % 64
            at = (
                m // block_tokens,
                c // 64,
                d % 16 // 4 * 2 + d % 2,
                m % block_tokens // 8,
                m % run,
                d // 16 * 2 + d % 4 // 2,
            )
            assert values[at] == np.float16(x[m, c])
            assert tuple(places[c]) == (at[2], at[5])
            seen[at] = True
    assert seen.sum() == rows * cols
    assert (values[~seen] == 0).all()


def test_half_rows_out_of_range_are_scaled_by_powers_of_two() -> None:
    x = np.ones((4, 64), dtype=np.float32) * np.array([[1e6], [1.0], [1e-5], [0.0]], dtype=np.float32)
    values, scales = half_activations(x, 8)
    assert np.isfinite(values).all()
    assert (np.frexp(scales)[0] == 0.5).all()
    assert scales[1] == scales[3] == 1
    for row in range(4):
        back = values[0, 0, :, 0, row].astype(np.float64) * scales[row]
        np.testing.assert_allclose(back, float(x[row, 0]), rtol=2**-11)


def test_int8_terms_are_of_the_codes() -> None:
    x = np.random.default_rng(0).standard_normal((3, 80)).astype(np.float32)
    x[1, :16] = 0
    codes, terms = int8_activations(x)
    assert codes.shape == (3, 128)
    assert terms.shape == (3, 8, 2)
    for row in range(3):
        for sixteen in range(8):
            scale = np.abs(x[row, sixteen * 16 : sixteen * 16 + 16]).max(initial=0) / np.float32(127)
            part = codes[row, sixteen * 16 : sixteen * 16 + 16].astype(int)
            assert terms[row, sixteen, 0] == pytest.approx(scale)
            assert terms[row, sixteen, 1] == pytest.approx(scale * part.sum(), abs=1e-6)
            seen = x[row, sixteen * 16 : sixteen * 16 + 16]
            assert np.abs(part[: seen.size] * scale - seen).max(initial=0) <= scale * 0.5001
