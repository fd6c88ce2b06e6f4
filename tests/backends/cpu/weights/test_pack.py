"""Repacking raw blocks: equal to packing their `Planes`, in any number of threads, and no larger than promised."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from backends.cpu.kernels.linear_harness import filled_blocks
from backends.cpu.packed import pack
from realizar.backends.cpu.codegen.formats import KEPT_LAYOUTS, format_at, format_number, packed_format
from realizar.backends.cpu.weights import pack as packing
from realizar.backends.cpu.weights.pack import allocate, no_bytes
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization.block_source import BlockSource, block_source
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES
from realizar.quantization.ggml_layouts import GGML_LAYOUTS, IQ2_XS, Q4_0, Q4_1, Q6_K
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import PlanesSource

_PLANES_TYPES = [each for each in QUANTIZED_TYPES if GGML_LAYOUTS[each] not in KEPT_LAYOUTS]


def random_source(ggml_type: GGMLType, rows: int, cols: int, seed: int = 1) -> BlockSource:
    return block_source(ggml_type, random_blocks(ggml_type, rows, cols, np.random.default_rng(seed), 0.02), rows, cols)


def without_raw(source: BlockSource) -> PlanesSource:
    return PlanesSource(source.layout, source.planes(0, source.out_features))


@pytest.mark.parametrize("ggml_type", _PLANES_TYPES, ids=lambda t: t.name)
def test_repacking_is_packing_planes(ggml_type: GGMLType) -> None:
    for rows, blocks in ((1, 1), (16, 2), (37, 3)):
        cols = blocks * ggml_type.block_size
        shape = (ggml_type, rows, cols)
        random = random_blocks(*shape, np.random.default_rng(1), 0.02)
        for data in (random, filled_blocks(*shape, 0x00), filled_blocks(*shape, 0xFF)):
            source = block_source(*shape[:1], data, rows, cols)
            got, want = pack(source, 16), pack(without_raw(source), 16)
            for field in ("codes", "scales", "supers"):
                np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)


@pytest.mark.parametrize("layout", KEPT_LAYOUTS, ids=lambda each: each.name)
def test_kept_blocks_are_half_words_by_lanes(layout: WeightLayout) -> None:
    ggml_type = GGMLType[layout.name]
    data = random_blocks(ggml_type, 21, 512, np.random.default_rng(2), 0.02)
    source = block_source(ggml_type, data, 21, 512)
    packed = pack(source, 16)
    rows = np.zeros((32, data.size // 21), np.uint8)
    rows[:21] = data.reshape(21, -1)
    want = rows.view(np.uint16).reshape(2, 16, -1).transpose(0, 2, 1)
    np.testing.assert_array_equal(packed.codes.view(np.uint16).reshape(want.shape), want)
    assert packed.table is not None
    with pytest.raises(UnsupportedModelError, match=f"layout {layout.name} run on the CPU only from their own blocks"):
        pack(without_raw(source), 16)


@pytest.mark.parametrize("ggml_type", [*QUANTIZED_TYPES, *FLOAT_TYPES], ids=lambda t: t.name)
def test_slices_pack_as_matrices_of_their_own(ggml_type: GGMLType) -> None:
    """Out_features of a slice by columns lie apart in memory."""
    unit = max(32, ggml_type.block_size)
    whole = random_source(ggml_type, 40, 4 * unit)
    part = whole.slice_out_features(3, 36).slice_columns(unit, 3 * unit)
    alone = block_source(ggml_type, np.ascontiguousarray(part.raw).reshape(-1), 33, 2 * unit)
    if part.layout.is_float:
        floats, expected = pack(part, 8), pack(alone, 8)
        np.testing.assert_array_equal(floats.weights.view(np.uint8), expected.weights.view(np.uint8))
        return
    got, want = pack(part, 8), pack(alone, 8)
    for field in ("codes", "scales", "supers"):
        np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_packed_size(ggml_type: GGMLType, lanes: int) -> None:
    cols, layout = 4 * 256, GGML_LAYOUTS[ggml_type]
    limit = 1.3 if ggml_type is GGMLType.TQ1_0 else 1.05
    assert allocate(layout, 64, cols, lanes).size_bytes <= limit * 64 * layout.row_bytes(cols)
    assert allocate(layout, 64, cols, lanes, zeros=no_bytes).size_bytes == allocate(layout, 64, cols, lanes).size_bytes


@pytest.mark.parametrize("planes", [False, True], ids=["raw", "planes"])
def test_threads_pack_the_same_and_report_every_row_once(planes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_PIECE_BYTES", 5000)
    raw = random_source(GGMLType.Q4_K, 205, 512, 3)
    source = without_raw(raw) if planes else raw
    done: list[tuple[int, int]] = []
    with ThreadPoolExecutor(3) as pool:
        got = pack(source, 16, pool, lambda start, stop: done.append((start, stop)))
    want = pack(raw, 16)
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.scales, want.scales)
    np.testing.assert_array_equal(got.supers, want.supers)
    assert len(done) > 3
    assert sorted(done)[0][0] == 0
    assert [stop for _, stop in sorted(done)] == [*[start for start, _ in sorted(done)][1:], 205]


def test_formats_have_numbers() -> None:
    """Each its own, the same in every process: kernels that were compiled earlier are found by them."""
    layouts = [GGML_LAYOUTS[each] for each in QUANTIZED_TYPES]
    forms = {packed_format(layout) for layout in layouts} | {packed_format(replace(Q4_1, group_size=4096))}
    numbers = {format_number(form) for form in forms}
    assert len(numbers) == len(forms)
    assert {format_at(number) for number in numbers} == forms
    assert max(numbers) < 1 << 62
    assert packed_format(GGML_LAYOUTS[GGMLType.TQ1_0]) == packed_format(GGML_LAYOUTS[GGMLType.TQ2_0])


_REFUSED: dict[str, tuple[WeightLayout, str]] = {
    "floats": (GGML_LAYOUTS[GGMLType.F16], "they have no codes"),
    "bits": (replace(Q4_0, bits=7), "codes have 7 bits"),
    "offset": (replace(Q4_0, offset=7), "codes of 4 bits have the offset 7"),
    "unsigned bytes": (replace(Q4_0, bits=8, offset=0), "codes of 8 bits have the offset 0"),
    "group": (replace(Q4_0, group_size=48), "groups have 48 columns"),
    "super group": (replace(Q6_K, super_group_size=24), "groups have 16 columns"),
    "scale": (replace(Q4_0, scale="f32"), "scales are of type f32"),
    "nibbles": (replace(Q6_K, scale="u4"), "scales are of type u4"),
    "minimum": (replace(Q4_1, scale="e8m0"), "minima are of type e8m0"),
    "centred": (replace(Q4_1, centred=True), "codes are centred"),
    "codebook": (replace(Q4_0, codebook=Codebook("many", 64, 1, lambda: np.zeros(64, np.int8))), "has 64 entries"),
    "vectors": (replace(IQ2_XS, bits=10), "no kernel reads its codebook of vectors, iq2_xs"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_layout_that_no_kernel_expresses_is_refused(case: str) -> None:
    layout, reason = _REFUSED[case]
    layout = replace(layout, name="ODD")
    with pytest.raises(UnsupportedModelError, match=f"^weights in the layout ODD do not run on the CPU: .*{reason}"):
        packed_format(layout)


def test_columns_that_are_no_whole_groups_are_refused() -> None:
    odd = replace(Q4_0, name="ODD", group_size=16, block_size=16, block_bytes=10)
    with pytest.raises(UnsupportedModelError, match="ODD do not run on the CPU: 48 columns are not a multiple of 32"):
        allocate(odd, 16, 48, 16)
