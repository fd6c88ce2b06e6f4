"""Fragment order against its description: every weight read back byte by byte, as a kernel would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from backends.grouped_source import grouped_layout, grouped_source
from realizar.backends.cuda.layouts.fragments import FragmentFormat, fragment_format, pack_fragments
from realizar.backends.cuda.weights.pack import PackedMatrix, codebook_table, strip_places
from realizar.backends.cuda.weights.pack_raw import memory_bytes, pack_by_threads
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization.block_source import BlockSource, block_source
from realizar.quantization.convert import QUANTIZED_TYPES
from realizar.quantization.ggml_layouts import GGML_LAYOUTS, IQ2_XS, Q2_K, Q4_0, Q4_1, Q6_K, Q8_0
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import MatrixSource
from realizar.quantization.source import random_source as source_of_layout


def random_source(ggml_type: GGMLType, rows: int, cols: int, seed: int = 0) -> BlockSource:
    data = random_blocks(ggml_type, rows, cols, np.random.default_rng(seed), 0.02)
    return block_source(ggml_type, data, rows, cols)


def check_weights(source: MatrixSource) -> None:
    """Weights of a packed matrix, drawn at random, are the source's."""
    rows, cols, form = source.out_features, source.in_features, fragment_format(source.layout)
    data, block_scales = pack_fragments(source.planes(0, rows), form)
    assert data.size == form.size_bytes(rows, cols)
    reader = Reader(form, data, block_scales, codebook_table(source.layout), cols)
    exact = source.dequantize()
    rng = np.random.default_rng(1)
    largest = np.abs(exact).max()
    for row, col in zip(rng.integers(0, rows, 300), rng.integers(0, cols, 300), strict=True):
        assert abs(reader.weight(int(row), int(col)) - exact[row, col]) <= 1e-3 * largest


def bits(data: np.ndarray, at: int, first: int, count: int) -> int:
    """`count` bits from bit `first` of the little-endian bytes at `at`."""
    value = int.from_bytes(data[at + first // 8 : at + (first + count + 7) // 8].tobytes(), "little")
    return (value >> (first % 8)) & ((1 << count) - 1)


def halves(data: np.ndarray, at: int, count: int) -> list[float]:
    return [float(x) for x in data[at : at + 2 * count].view(np.float16)]


class Reader:
    """One weight at a time, by the words of the layout's description."""

    def __init__(
        self, form: FragmentFormat, data: np.ndarray, block_scales: np.ndarray, table: np.ndarray | None, cols: int
    ) -> None:
        self.form, self.data, self.block_scales, self.table, self.cols = form, data, block_scales, table, cols

    def code(self, block: int, tile: int, lane: int, half: int, j: int, b: int) -> int:
        form = self.form
        if form.codebook:
            at = block + (tile * 32 + lane) * 16 + 4 * j
            value = int(self.table[bits(self.data, at, 16 * half + 4 * b, 4)])  # type: ignore[index]
            return value - 128 if form.e2m1 else value
        if form.bits == 8:
            return int(self.data[block + tile * 1024 + half * 512 + lane * 16 + 4 * j + b])
        value = shift = start = 0
        for width in {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}[form.bits]:
            at = block + start + (tile * 32 + lane) * 4 * width
            if width == 4:
                field = bits(self.data, at + 4 * j + b, 4 * half, 4)
            elif width == 2:
                field = bits(self.data, at + 4 * half + b, 2 * j, 2)
            else:
                field = bits(self.data, at + b, 4 * half + j, 1)
            value |= field << shift
            shift, start = shift + width, start + 4 * 32 * 4 * width
        return value

    def vector(self, block: int, tile: int, lane: int, half: int, place: int) -> int:
        form = self.form
        count = 32 // form.vector
        which = half * count // 2 + place // form.vector
        index = int(self.data[block + (tile * 32 + lane) * count + which])
        start = block + 128 * count
        sign = 0
        if form.signs:
            sign = bits(self.data, start + (tile * 32 + lane) * 4, 16 * half + place, 1)
            start += 512
        if form.high_bits:
            size = form.high_bits
            index |= bits(self.data, start, ((tile * 32 + lane) * count + which) * size, size) << 8
        value = int(self.table[index * form.vector + place % form.vector]) - 128  # type: ignore[index]
        return 128 + (-value if sign else value)

    def scales(self, block: int, supers: int, tile: int, g: int, t: int, half: int) -> tuple[float, float]:
        """Scale and minimum without the powers of two of storage, but for 2^e."""
        form = self.form
        at = block + form.codes_bytes + tile * form.tile_scale_bytes
        entry = (t * form.sets // 4 * 8 + g) * 2 + half
        place = 2.0 ** (form.positions[half] - 24)
        if form.small == "f16":
            found = halves(self.data, at + entry * (4 if form.minima else 2), 2 if form.minima else 1)
            return found[0] * place, found[1] if form.minima else 0.0
        if form.small == "f16_high":
            return halves(np.array([0, self.data[at + entry]], np.uint8), 0, 1)[0] * place, 0.0
        width = 2 if form.minima else 1
        found = halves(self.data, supers + ((tile * 8 + g) * 2 + half) * 2 * width, width)
        small: tuple[int, int] = (1, 0)
        if form.small == "u4_pair":
            small = bits(self.data, at + entry, 0, 4), bits(self.data, at + entry, 4, 4)
        elif form.small == "i8":
            small = int(self.data[at + entry : at + entry + 1].view(np.int8)[0]), 0
        elif form.small == "u4_odd":
            small = 2 * bits(self.data, at + entry // 2, 4 * half, 4) + 1, 0
        return found[0] * place * small[0], found[1] * small[1] if form.minima else 0.0

    def weight(self, row: int, col: int) -> float:
        form, chunk, strip = self.form, col // 64, row // 64
        tile, half, g = row % 64 // 16, row % 16 // 8, row % 8
        t, place = col % 64 // 16, col % 16
        lane, start = 4 * g + t, strip * form.strip_bytes(self.cols)
        block = start + chunk * form.block_bytes + (chunk // 4 * form.super_bytes if form.two_level else 0)
        supers = start + (chunk // 4 + 1) * 4 * form.block_bytes + chunk // 4 * form.super_bytes
        scale, minimum = self.scales(block, supers, tile, g, t, half)
        if form.vector:
            code = self.vector(block, tile, lane, half, place)
        else:
            code = self.code(block, tile, lane, half, place // 4, place % 4)
        return (scale * (code - form.offset) + minimum) * float(self.block_scales[strip])


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES, ids=lambda ggml_type: ggml_type.name)
def test_every_weight_is_where_the_layout_says(ggml_type: GGMLType) -> None:
    cols = ggml_type.block_size * -(-320 // ggml_type.block_size)
    check_weights(random_source(ggml_type, 84, cols))


@pytest.mark.parametrize("group", [64, 128])
def test_a_layout_of_no_ggml_type(group: int) -> None:
    """Threads pack it, whole and as a shard, as it is packed at once."""
    whole = grouped_source(704, 5 * group, group)
    for source in (whole, whole.slice_out_features(64, 500).slice_columns(group, 4 * group)):
        check_weights(source)
        check_packed([source], pack_by_threads([source], "cpu"))


def test_minima_take_the_offset_of_codes() -> None:
    layout = replace(grouped_layout(64), bits=8, block_bytes=68, offset=128)
    assert fragment_format(layout).offset == 0
    check_weights(source_of_layout(layout, 84, 320, np.random.default_rng(4), 0.02))


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.IQ2_XS])
def test_padding_weighs_nothing(ggml_type: GGMLType) -> None:
    cols = max(96, ggml_type.block_size)
    source = random_source(ggml_type, 70, cols)
    form = fragment_format(source.layout)
    reader = Reader(form, *pack_fragments(source.planes(0, 70), form), codebook_table(source.layout), cols)
    beyond = [(row, col) for row in (70, 127) for col in (0, cols - 1)]
    beyond += [(3, col) for col in range(cols, form.chunks(cols) * 64)]
    assert all(reader.weight(row, col) == 0 for row, col in beyond)


@pytest.mark.parametrize("ggml_type", QUANTIZED_TYPES)
def test_no_type_packs_to_much_more_than_its_file(ggml_type: GGMLType) -> None:
    rows, cols = 64, 4096
    form = fragment_format(GGML_LAYOUTS[ggml_type])
    in_file = rows * cols // ggml_type.block_size * ggml_type.type_size
    limit = 1.3 if ggml_type is GGMLType.TQ1_0 else 1.12
    assert form.size_bytes(rows, cols) + 4 <= limit * in_file
    assert form.block_bytes % 16 == 0
    assert form.super_bytes % 16 == 0


def test_powers_of_two_take_a_byte() -> None:
    """MXFP4 packs to its own 4.25 bits, and scales down to 2^-30 of the largest are exact."""
    form = fragment_format(GGML_LAYOUTS[GGMLType.MXFP4])
    assert form.size_bytes(2880, 2880) * 8 == 4.25 * 2880 * 2880
    planes = random_source(GGMLType.MXFP4, 64, 64).planes(0, 64)
    factors = np.float32(2.0) ** -np.arange(64, dtype=np.float32)[:, None]
    spread = replace(planes, scales=np.full_like(planes.scales, 2.0**-9) * factors)
    reader = Reader(form, *pack_fragments(spread, form), codebook_table(GGML_LAYOUTS[GGMLType.MXFP4]), 64)
    exact = spread.dequantize()
    assert all(reader.weight(row, col) == exact[row, col] for row in range(31) for col in (0, 17, 63))
    assert all(reader.weight(row, col) == 0 for row in range(31, 64) for col in (0, 17, 63))


def test_scales_far_apart_keep_their_precision() -> None:
    """Rows of one strip whose scales differ by 2^12 each lose no more than a half float's rounding."""
    planes = random_source(GGMLType.Q8_0, 64, 64).planes(0, 64)
    factors = np.float32(2.0) ** -np.linspace(0, 12, 64, dtype=np.float32)[:, None]
    spread = replace(planes, scales=np.abs(planes.scales) * factors)
    form = fragment_format(Q8_0)
    reader = Reader(form, *pack_fragments(spread, form), None, 64)
    exact = spread.dequantize()
    for row in range(64):
        for col in (0, 17, 63):
            assert reader.weight(row, col) == pytest.approx(float(exact[row, col]), rel=2**-10)


def test_scale_exponents_follow_the_largest_scale() -> None:
    for factor in (2.0**-60, 1.0, 2.0**40):
        planes = random_source(GGMLType.Q4_0, 64, 64).planes(0, 64)
        scaled = replace(planes, scales=planes.scales * np.float32(factor))
        form = fragment_format(Q4_0)
        data, block_scales = pack_fragments(scaled, form)
        top = np.abs(data.reshape(-1)[form.codes_bytes :].view(np.float16).astype(np.float32)).max()
        assert 2.0**14 <= top <= 2.0**15
        reader = Reader(form, data, block_scales, None, 64)
        assert reader.weight(5, 6) == pytest.approx(float(scaled.dequantize()[5, 6]), rel=2**-10)


def test_parts_lie_one_below_the_other() -> None:
    parts = [random_source(GGMLType.Q4_K, rows, 256, seed) for seed, rows in enumerate((64, 128, 70))]
    merged = pack_by_threads(parts, "cpu")
    alone = [pack_by_threads([part], "cpu") for part in parts]
    assert merged.out_features == 262
    assert torch.equal(merged.weights, torch.cat([matrix.weights for matrix in alone]))
    assert torch.equal(merged.block_scales, torch.cat([matrix.block_scales for matrix in alone]))
    memory = torch.zeros(memory_bytes(parts), dtype=torch.uint8)
    assert pack_by_threads(parts, "cpu", memory).weights.data_ptr() == memory.data_ptr()
    assert torch.equal(memory[: merged.weights.numel()], merged.weights)


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.Q3_K])
def test_strips_of_gate_and_up_take_turns(ggml_type: GGMLType) -> None:
    """Both have six strips, packed some at a time."""
    cols = max(96, ggml_type.block_size)
    parts = [random_source(ggml_type, 384, cols, seed) for seed in range(2)]
    alone = [pack_by_threads([each], "cpu") for each in parts]
    memory = torch.zeros(memory_bytes(parts), dtype=torch.uint8)
    for got in (pack_by_threads(parts, "cpu", into, interleaved=True) for into in (None, memory)):
        assert got.interleaved
        assert (got.out_features, got.in_features, got.format) == (768, cols, alone[0].format)
        strips = got.weights.view(12, got.format.strip_bytes(cols))
        for strip in range(12):
            part = alone[strip % 2]
            assert torch.equal(strips[strip], part.weights.view(6, -1)[strip // 2])
            assert got.block_scales[strip] == part.block_scales[strip // 2]
    assert memory.data_ptr() == got.weights.data_ptr()


def test_only_two_alike_take_turns() -> None:
    for rows in ((64,), (64, 128), (64, 64, 64), (70, 70)):
        with pytest.raises(UnsupportedModelError, match="two matrices interleave"):
            strip_places(rows, interleaved=True)


def test_pairs_that_take_turns_lie_one_behind_the_other() -> None:
    places = [list(range(6))[place] for place in strip_places((128, 128, 64, 64), interleaved=True)]
    assert places == [[0, 2], [1, 3], [4], [5]]


def test_parts_that_do_not_fit_are_refused() -> None:
    four, six = random_source(GGMLType.Q4_K, 64, 256), random_source(GGMLType.Q6_K, 64, 256)
    for parts in (
        [four, six],
        [random_source(GGMLType.Q4_K, 63, 256), four],
        [four, random_source(GGMLType.Q4_K, 64, 512)],
        [random_source(GGMLType.IQ4_NL, 64, 256), random_source(GGMLType.MXFP4, 64, 256)],
    ):
        with pytest.raises(UnsupportedModelError):
            pack_by_threads(parts, "cpu")


_REFUSED: dict[str, tuple[WeightLayout, str]] = {
    "floats": (GGML_LAYOUTS[GGMLType.F32], "float32 is not packed"),
    "group": (replace(Q4_0, group_size=48), "groups have 48 columns"),
    "super group": (replace(Q6_K, super_group_size=128), "groups have 16 columns"),
    "bits": (replace(Q4_0, bits=7), "codes have 7 bits"),
    "one bit": (replace(Q4_1, bits=1), "codes have 1 bits"),
    "offset": (replace(Q4_0, offset=7), "codes have the offset 7"),
    "offset and minimum": (replace(Q2_K, offset=2), "codes have the offset 2"),
    "scale": (replace(Q6_K, scale="u8"), "scales are of type u8"),
    "codebook": (replace(Q4_0, codebook=Codebook("many", 64, 1, lambda: np.zeros(64, np.int8))), "has 64 entries"),
    "vectors": (replace(IQ2_XS, bits=11), "no kernel reads its codebook of vectors with indices of 11 bits"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_layout_that_no_kernel_expresses_is_refused(case: str) -> None:
    layout, reason = _REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=f"^weights in the layout ODD do not run on CUDA: .*{reason}"):
        fragment_format(replace(layout, name="ODD"))


@pytest.mark.parametrize("ggml_type", [GGMLType.Q3_K, GGMLType.IQ2_XS, GGMLType.Q8_0, GGMLType.TQ2_0])
def test_threads_pack_the_same(ggml_type: GGMLType) -> None:
    cols = max(96, ggml_type.block_size)
    parts = [random_source(ggml_type, rows, cols, rows) for rows in (320, 576, 70)]
    got = pack_by_threads(parts, "cpu")
    check_packed(parts, got)
    table = codebook_table(parts[0].layout)
    assert (None if got.table is None else got.table.tolist()) == (None if table is None else table.tolist())
    assert (got.out_features, got.in_features) == (966, cols)


def check_packed(parts: Sequence[MatrixSource], got: PackedMatrix) -> None:
    """Parts lie one below the other, each as `pack_fragments` packs all of it."""
    form = fragment_format(parts[0].layout)
    weights, scales = zip(*(pack_fragments(part.planes(0, part.out_features), form) for part in parts), strict=True)
    assert got.format == form
    assert np.array_equal(got.weights.numpy(), np.concatenate(weights))
    assert np.array_equal(got.block_scales.numpy(), np.concatenate(scales))
