"""Ids and block sizes against the PyPI `gguf` package, and against sums of the block's fields where it has none."""

from __future__ import annotations

import gguf
import pytest

from realizar.checkpoint.ggml_types import REMOVED_TYPES, GGMLType

# ggml's block_q8_1 has two halves beside its 32 codes; the package counts two floats, and no file holds the type.
_PACKAGE_IS_WRONG = {GGMLType.Q8_1: (32, 2 + 2 + 32)}


@pytest.mark.parametrize("kind", gguf.GGMLQuantizationType, ids=lambda kind: str(kind.name))
def test_equals_package(kind: gguf.GGMLQuantizationType) -> None:
    ours = GGMLType[kind.name]
    assert ours == int(kind)
    expected = _PACKAGE_IS_WRONG.get(ours, gguf.GGML_QUANT_SIZES[kind])
    assert (ours.block_size, ours.type_size) == expected


def test_q2_0_is_a_half_and_64_codes_of_two_bits() -> None:
    assert GGMLType.Q2_0 == 42
    assert GGMLType.Q2_0.block_size == 64
    assert GGMLType.Q2_0.type_size == 2 + 64 * 2 // 8


def test_ids_are_contiguous_with_the_removed_ones() -> None:
    live = {int(kind) for kind in GGMLType}
    assert not live & REMOVED_TYPES.keys()
    assert live | REMOVED_TYPES.keys() == set(range(43))
