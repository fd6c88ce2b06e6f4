"""Repacking raw blocks: equal to packing their `Planes`, in any number of threads, and no larger than promised."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from backends.cpu.kernels.linear_harness import filled_blocks
from backends.cpu.weights.planes_packing import pack_planes
from realizar.backends.cpu.weights import pack as packing
from realizar.backends.cpu.weights.formats import KEPT_TYPES
from realizar.backends.cpu.weights.pack import allocate, pack
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization import QUANTIZED_TYPES, random_blocks

_PLANES_TYPES = [ggml_type for ggml_type in QUANTIZED_TYPES if ggml_type.name not in KEPT_TYPES]


@pytest.mark.parametrize("ggml_type", _PLANES_TYPES, ids=lambda t: t.name)
def test_repacking_is_packing_planes(ggml_type: GGMLType) -> None:
    rng = np.random.default_rng(1)
    for rows, blocks in ((1, 1), (16, 2), (37, 3)):
        cols = blocks * ggml_type.block_size
        shape = (ggml_type, rows, cols)
        for data in (random_blocks(*shape, rng, 0.02), filled_blocks(*shape, 0x00), filled_blocks(*shape, 0xFF)):
            got, want = pack(ggml_type, data, rows, cols, 16), pack_planes(ggml_type, data, rows, cols, 16)
            for field in ("codes", "scales", "supers"):
                np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)


@pytest.mark.parametrize("name", KEPT_TYPES)
def test_kept_blocks_are_half_words_by_lanes(name: str) -> None:
    ggml_type = GGMLType[name]
    data = random_blocks(ggml_type, 21, 512, np.random.default_rng(2), 0.02)
    packed = pack(ggml_type, data, 21, 512, 16)
    rows = np.zeros((32, data.size // 21), np.uint8)
    rows[:21] = data.reshape(21, -1)
    want = rows.view(np.uint16).reshape(2, 16, -1).transpose(0, 2, 1)
    np.testing.assert_array_equal(packed.codes.view(np.uint16).reshape(want.shape), want)
    assert packed.table is not None


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_packed_size(ggml_type: GGMLType, lanes: int) -> None:
    cols = 4 * 256
    file_bytes = 64 * cols // ggml_type.block_size * ggml_type.type_size
    limit = 1.3 if ggml_type is GGMLType.TQ1_0 else 1.05
    assert allocate(ggml_type.name, 64, cols, lanes).size_bytes <= limit * file_bytes


def test_threads_pack_the_same_and_tell_every_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_PIECE_BYTES", 5000)
    rows, cols = 205, 512
    data = random_blocks(GGMLType.Q4_K, rows, cols, np.random.default_rng(3), 0.02)
    done: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as pool:
        got = pack(GGMLType.Q4_K, data, rows, cols, 16, pool, lambda start, stop: done.append((start, stop)))
    want = pack(GGMLType.Q4_K, data, rows, cols, 16)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales, want.scales)
    np.testing.assert_array_equal(got.supers, want.supers)
    assert len(done) > 3
    assert sorted(done)[0][0] == 0
    assert [stop for _, stop in sorted(done)] == [*[start for start, _ in sorted(done)][1:], data.size]


def test_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        allocate("Q8_K", 16, 256, 16)
