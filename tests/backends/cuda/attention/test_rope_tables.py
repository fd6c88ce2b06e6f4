"""Tables of rope and of queries' growth have the bits of those that the CPU backend makes. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cpu import bind_kv as on_cpu  # noqa: E402
from realizar.backends.cuda.attention.rope_tables import RopeTables  # noqa: E402


def test_the_bits_are_those_of_the_cpu() -> None:
    spec, _ = random_model(Recipe(windows=(None,), parts=("growth",)))
    ((_, attention),) = spec.attentions()
    assert attention.rope is not None
    assert attention.query_growth is not None
    length = 5000  # in two parts
    tables, expected = RopeTables(spec, length, torch.device("cpu")), on_cpu.RopeTables(spec, length)
    expected.fill(np.arange(length, dtype=np.int32))
    for found, own in zip(tables.get(attention.rope), expected._tables[attention.rope], strict=True):
        np.testing.assert_array_equal(found.numpy().ravel(), own)
    scales = tables.query_scales(attention.query_growth).numpy()
    np.testing.assert_array_equal(scales, expected._growths[attention.query_growth])
    assert scales[7] == 1.0 < scales[8]
