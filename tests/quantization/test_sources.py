"""Weight sources of every ggml type: their layouts, and slices by out_features and by columns, against `dequantize`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.mapped_file import MappedFile
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.quantization.block_source import BlockSource, block_source
from realizar.quantization.convert import FLOAT_TYPES, QUANTIZED_TYPES, dequantize
from realizar.quantization.finite import find_not_finite
from realizar.quantization.ggml_layouts import GGML_LAYOUTS
from realizar.quantization.random_blocks import random_blocks
from realizar.quantization.source import PlanesSource, random_source
from realizar.quantization.tensors import expert_source, tensor_layout, tensor_source

ROWS, BLOCKS = 7, 5
ALL = [pytest.param(each, id=each.name) for each in (*QUANTIZED_TYPES, *FLOAT_TYPES)]
QUANTIZED = [pytest.param(each, id=each.name) for each in QUANTIZED_TYPES]


def random_data(ggml_type: GGMLType, rows: int = ROWS, blocks: int = BLOCKS) -> np.ndarray:
    return random_blocks(ggml_type, rows, blocks * ggml_type.block_size, np.random.default_rng(1), 0.02)


def source_of(ggml_type: GGMLType) -> BlockSource:
    return block_source(ggml_type, random_data(ggml_type), ROWS, BLOCKS * ggml_type.block_size)


def checkpoint_of(ggml_type: GGMLType, data: np.ndarray, shape: tuple[int, ...]) -> Checkpoint:
    return Checkpoint(Path("m.gguf"), "gguf", {}, {"w": StoredTensor("w", ggml_type, shape, data, Path("m.gguf"), 96)})


@pytest.mark.parametrize("ggml_type", QUANTIZED)
def test_a_layout_says_what_planes_hold(ggml_type: GGMLType) -> None:
    source = source_of(ggml_type)
    layout, planes = source.layout, source.planes(0, ROWS)
    assert layout is GGML_LAYOUTS[ggml_type]
    assert (layout.block_size, layout.block_bytes) == (ggml_type.block_size, ggml_type.type_size)
    assert planes.layout is layout
    assert (layout.minimum, layout.signs) == (planes.minima is not None, planes.signs is not None)
    assert (layout.super_group_size is None) == (planes.super_scales is None)
    if layout.codebook is not None:
        assert layout.codebook.entries == len(layout.codebook.load())
        assert layout.vector_size == np.size(layout.codebook.load()[0])
    for values in (planes.scales, planes.minima):
        if values is not None and not layout.centred:
            check_scale_type(layout.scale, values)
    if layout.centred:
        np.testing.assert_array_equal(planes.scales, -2 * np.asarray(planes.minima))


def check_scale_type(scale: str, values: np.ndarray) -> None:
    """Check that a type holds these values exactly."""
    bounds = {"i8": (-128, 127), "u8": (0, 63), "u4": (0, 15), "odd4": (1, 31)}
    if scale in bounds:
        assert values.dtype == np.int16
        assert bounds[scale][0] <= values.min() <= values.max() <= bounds[scale][1]
    elif scale == "e8m0":
        assert set(np.frexp(values)[0].ravel().tolist()) == {0.5}
    else:
        np.testing.assert_array_equal(values.astype(np.float16).astype(np.float32), values)


def test_every_type_has_a_layout_of_its_own() -> None:
    assert set(GGML_LAYOUTS) == {*QUANTIZED_TYPES, *FLOAT_TYPES}
    assert len(set(GGML_LAYOUTS.values())) == len(GGML_LAYOUTS)
    assert [each.name for each in GGML_LAYOUTS.values()] == [each.name for each in GGML_LAYOUTS]


@pytest.mark.parametrize("ggml_type", ALL)
def test_slices(ggml_type: GGMLType) -> None:
    """Slices of out_features, of columns, of both and of slices; by planes too; and some out_features in any order."""
    source, unit = source_of(ggml_type), ggml_type.block_size
    whole = dequantize(ggml_type, random_data(ggml_type), ROWS, BLOCKS * unit)
    np.testing.assert_array_equal(source.dequantize(), whole)
    np.testing.assert_array_equal(source.read(2, 5), whole[2:5])
    np.testing.assert_array_equal(source.slice_out_features(3, 6).read(1, 3), whole[4:6])
    np.testing.assert_array_equal(source.slice_columns(unit, 3 * unit).dequantize(), whole[:, unit : 3 * unit])
    shard = (
        source.slice_out_features(1, 6)
        .slice_columns(unit, 5 * unit)
        .slice_columns(unit, 2 * unit)
        .slice_out_features(2, 4)
    )
    assert (shard.out_features, shard.in_features, shard.size_bytes) == (2, unit, 2 * ggml_type.type_size)
    np.testing.assert_array_equal(shard.dequantize(), whole[3:5, 2 * unit : 3 * unit])
    ids = np.array([6, 0, 0, 3], np.int32)
    np.testing.assert_array_equal(source.gather(ids), whole[ids])
    np.testing.assert_array_equal(source.slice_columns(unit, 2 * unit).gather(ids), whole[ids, unit : 2 * unit])
    assert source.slice_out_features(4, 4).dequantize().shape == (0, BLOCKS * unit)


@pytest.mark.parametrize("ggml_type", QUANTIZED)
def test_slices_of_planes(ggml_type: GGMLType) -> None:
    """A source without raw bytes is sliced by its planes, as formats without ggml's blocks are."""
    raw, unit = source_of(ggml_type), ggml_type.block_size
    source = PlanesSource(raw.layout, raw.planes(0, ROWS))
    assert source.raw is None
    shard, expected = (
        source.slice_out_features(2, 6).slice_columns(2 * unit, 4 * unit),
        raw.slice_out_features(2, 6).slice_columns(2 * unit, 4 * unit),
    )
    np.testing.assert_array_equal(shard.dequantize(), expected.dequantize())
    np.testing.assert_array_equal(
        shard.slice_out_features(1, 3).slice_columns(unit, 2 * unit).dequantize(), expected.read(1, 3)[:, unit:]
    )
    ids = np.array([3, 3, 0], np.int32)
    np.testing.assert_array_equal(shard.gather(ids), expected.gather(ids))
    assert shard.raw is None


@pytest.mark.parametrize("ggml_type", ALL)
def test_what_is_no_slice_is_refused(ggml_type: GGMLType) -> None:
    source, unit = source_of(ggml_type), ggml_type.block_size
    sources = [source] if source.layout.is_float else [source, PlanesSource(source.layout, source.planes(0, ROWS))]
    for each in sources:
        for run in ((0, ROWS + 1), (-1, 2), (3, 2)):
            with pytest.raises(ValueError, match=f"has {ROWS} out_features, not {run[0]} to {run[1]}"):
                each.slice_out_features(*run)
        with pytest.raises(ValueError, match=f"has {BLOCKS * unit} columns, not 0 to {6 * unit}"):
            each.slice_columns(0, 6 * unit)
        if unit > 1:
            for run in ((unit // 2, unit), (0, unit + 1), (8, unit)):
                with pytest.raises(ValueError, match=f"not at borders of {ggml_type.name} blocks, which hold {unit} "):
                    each.slice_columns(*run)


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.BF16], ids=lambda each: each.name)
def test_experts_of_a_stack(ggml_type: GGMLType) -> None:
    shape = (3, ROWS, 2 * ggml_type.block_size)
    data = random_data(ggml_type, 3 * ROWS, 2)
    checkpoint = checkpoint_of(ggml_type, data, shape)
    whole = dequantize(ggml_type, data, 3 * ROWS, shape[2]).reshape(shape)
    for expert in range(3):
        source = expert_source(checkpoint, "w", expert)
        assert (source.out_features, source.in_features) == shape[1:]
        np.testing.assert_array_equal(source.dequantize(), whole[expert])
    with pytest.raises(ValueError, match="has 3 experts, and not number 3"):
        expert_source(checkpoint, "w", 3)
    with pytest.raises(ValueError, match="is not a stack"):
        expert_source(checkpoint_of(ggml_type, data, (3 * ROWS, shape[2])), "w", 0)


@pytest.mark.parametrize("ggml_type", ALL)
def test_runs_of_out_features_that_alternate(ggml_type: GGMLType) -> None:
    """Three heads of queries of 4 out_features, each followed by its gate of 3: both are matrices with bytes."""
    data, cols = random_data(ggml_type, 3 * 7, 2), 2 * ggml_type.block_size
    source = block_source(ggml_type, data, 21, cols)
    whole = dequantize(ggml_type, data, 21, cols).reshape(3, 7, cols)
    for first, run in ((0, 4), (4, 3)):
        part, expected = source.every(first, 7, run), whole[:, first : first + run].reshape(3 * run, cols)
        assert (part.out_features, part.in_features, part.layout) == (3 * run, cols, source.layout)
        np.testing.assert_array_equal(part.dequantize(), expected)
        raw = part.raw
        assert raw is not None
        again = block_source(ggml_type, np.ascontiguousarray(raw).reshape(-1), 3 * run, cols)
        np.testing.assert_array_equal(again.dequantize(), expected)
        if not part.layout.is_float:
            np.testing.assert_array_equal(part.planes(1, run + 2).dequantize(), expected[1 : run + 2])
        shard = part.slice_out_features(2, 6).slice_columns(cols // 2, cols)
        np.testing.assert_array_equal(shard.dequantize(), expected[2:6, cols // 2 :])
        assert shard.raw is not None
        assert part.find_not_finite(0, 3 * run) is None
    for step, run in ((5, 2), (7, 8), (3, 4)):
        with pytest.raises(ValueError, match=f"tensor 'matrix' of 21 out_features has no {run} from 0 of each {step}"):
            source.every(0, step, run)


def test_vectors_and_tensors() -> None:
    values = np.arange(6, dtype=np.float32)
    vector = tensor_source(checkpoint_of(GGMLType.F32, values.view(np.uint8), (6,)), "w")
    np.testing.assert_array_equal(vector.slice_columns(2, 5).dequantize(), values[None, 2:5])
    with pytest.raises(UnsupportedModelError, match=r"^m\.gguf: tensor 'w': weights of type I32 are not supported$"):
        tensor_layout(checkpoint_of(GGMLType.I32, values.view(np.uint8), (6,)), "w")


class _AdvisedFile(MappedFile):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def release(self, offset: int, size: int) -> None:
        self.seen.append((offset, size))

    prefetch = release


def test_pages_of_a_slice() -> None:
    """The system is advised of exactly the bytes of the out_features, wherever the slice starts."""
    data, file = random_data(GGMLType.Q8_0, 12, 2), _AdvisedFile()
    stored = StoredTensor("w", GGMLType.Q8_0, (3, 4, 64), data, Path("m.gguf"), 100, file=file)
    part = stored.part(68, 136)
    np.testing.assert_array_equal(part.data, data[part.offset - 100 :][: part.size_bytes])
    checkpoint = Checkpoint(Path("m.gguf"), "gguf", {}, {"w": stored})
    expert = expert_source(checkpoint, "w", 1)
    expert.release(1, 3)
    expert.slice_out_features(1, 4).slice_columns(32, 64).release(0, 2)
    expert.prefetch()
    PlanesSource(expert.layout, expert.planes(0, 4)).slice_out_features(1, 2).release(0, 1)
    runs = expert.every(0, 2, 2)
    runs.release(0, 2)
    runs.release(2, 4)
    runs.prefetch()
    whole = (100 + 4 * 68, 4 * 68)
    assert file.seen == [(100 + 5 * 68, 2 * 68), (100 + 5 * 68, 2 * 68), whole, whole, whole]


def test_errors_name_file_tensor_and_block() -> None:
    data = random_data(GGMLType.Q4_0, 6, 4)
    data.reshape(-1, 18)[14, :2] = 0xFF  # in out_feature 3
    source = tensor_source(checkpoint_of(GGMLType.Q4_0, data, (6, 128)), "w")
    source.check_finite(0, 3)
    for start, stop, part in (
        (0, 6, source),
        (3, 4, source),
        (0, 4, source.slice_out_features(2, 6)),
        (1, 2, source.slice_out_features(2, 6)),
    ):
        with pytest.raises(CheckpointError, match=r"^m\.gguf: tensor 'w': the scale of block 14 is not finite$"):
            part.check_finite(start, stop)
    planes = source.planes(0, 6)
    with pytest.raises(CheckpointError, match=r"tensor 'matrix': a scale of out_feature 3 is not finite$"):
        PlanesSource(source.layout, planes).check_finite(1, 5)


@pytest.mark.parametrize("ggml_type", QUANTIZED)
def test_random_matrices(ggml_type: GGMLType) -> None:
    layout = GGML_LAYOUTS[ggml_type]
    source = random_source(layout, 64, 4 * layout.block_size, np.random.default_rng(2), 0.05)
    planes, weights = source.planes(0, 64), source.dequantize()
    assert 0.04 < np.sqrt(np.mean(np.square(weights))) < 0.06
    assert len(np.unique(planes.codes)) > 0.9 * min(1 << layout.bits, planes.codes.size // 4)
    assert planes.codes.max() < 1 << layout.bits
    check_scale_type(layout.scale, planes.scales)
    assert source.find_not_finite(0, 64) is None


def test_data_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="35 bytes are not 1 out_features of 32 Q8_0 weights"):
        block_source(GGMLType.Q8_0, np.zeros(35, np.uint8), 1, 32)
    with pytest.raises(ValueError, match="33 columns are not a whole number of Q8_0 blocks"):
        block_source(GGMLType.Q8_0, np.zeros(35, np.uint8), 1, 33)
    assert find_not_finite(GGMLType.F32, np.array([0, np.inf], "<f4").view(np.uint8), 5) == "number 6 is not finite"
