"""Divisors of rope frequencies that no model has: the largest stop a dimension, and nothing warns."""

from __future__ import annotations

import numpy as np
import pytest

from realizar.models.rope import divided_frequencies, plain_frequencies


@pytest.mark.parametrize("divisor", [1e-15, 1.0, 1e30, 3.4e38])
@pytest.mark.parametrize("factor", [1e-15, 1.0, 1e12])
@pytest.mark.parametrize("base", [1.001, 1e4, 1e12])
def test_frequencies_are_finite(base: float, factor: float, divisor: float) -> None:
    """NumPy's warnings are errors here."""
    found = divided_frequencies(base, 64, np.full(32, divisor, np.float32), factor)
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    exact = plain_frequencies(base, 64).astype(np.float64) / divisor / factor
    assert found == pytest.approx(exact, rel=1e-5, abs=1e-37)
