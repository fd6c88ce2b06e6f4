"""The grids, against the tables that the `gguf` package carries."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from realizar.quantization.iq_grids import GridName, grid, shifted_iq1_grid

ORACLES: list[tuple[GridName, str]] = [
    ("iq2_xxs", "IQ2_XXS"),
    ("iq2_xs", "IQ2_XS"),
    ("iq2_s", "IQ2_S"),
    ("iq3_xxs", "IQ3_XXS"),
    ("iq3_s", "IQ3_S"),
    ("iq1", "IQ1_S"),
]


@pytest.mark.parametrize(("name", "oracle"), ORACLES)
def test_grid(name: GridName, oracle: str) -> None:
    traits = getattr(gguf.quants, oracle)
    traits.init_grid()
    expected = traits.grid.reshape(traits.grid_shape)
    assert grid(name).dtype == np.int8
    assert np.array_equal(grid(name), expected)


def test_grids_are_shared_and_read_only() -> None:
    assert grid("iq3_s") is grid("iq3_s")
    with pytest.raises(ValueError, match="read-only"):
        grid("iq3_s")[0, 0] = 1


def test_shifted_grid_is_eight_times_grid_plus_or_minus_an_eighth() -> None:
    exact = grid("iq1").astype(np.float64)
    assert np.array_equal(shifted_iq1_grid()[:2048] / 8, exact + 0.125)
    assert np.array_equal(shifted_iq1_grid()[2048:] / 8, exact - 0.125)
