"""The PyPI `gguf` package reads the files of `write_gguf`."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf

VALUES = {
    "u8": (np.uint8(7), gguf.GGUFValueType.UINT8),
    "i8": (np.int8(-7), gguf.GGUFValueType.INT8),
    "u16": (np.uint16(7), gguf.GGUFValueType.UINT16),
    "i16": (np.int16(-7), gguf.GGUFValueType.INT16),
    "f32": (np.float32(0.5), gguf.GGUFValueType.FLOAT32),
    "f64": (np.float64(0.1), gguf.GGUFValueType.FLOAT64),
    "plain int": (7, gguf.GGUFValueType.UINT32),
    "negative int": (-7, gguf.GGUFValueType.INT32),
    "large int": (1 << 40, gguf.GGUFValueType.UINT64),
    "large negative int": (-(1 << 40), gguf.GGUFValueType.INT64),
    "plain float": (0.25, gguf.GGUFValueType.FLOAT32),
    "bool": (True, gguf.GGUFValueType.BOOL),
    "text": ("grüße", gguf.GGUFValueType.STRING),
    "texts": (["a", "", "é"], gguf.GGUFValueType.STRING),
    "ints": ([1, -2], gguf.GGUFValueType.INT32),
    "floats": ([1, 0.5], gguf.GGUFValueType.FLOAT32),
    "bools": ([True, False], gguf.GGUFValueType.BOOL),
    "array": (np.arange(3, dtype=np.uint16), gguf.GGUFValueType.UINT16),
}


def test_metadata_is_read_by_the_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {key: value for key, (value, _) in VALUES.items()})
    fields = gguf.GGUFReader(path).fields
    for key, (value, kind) in VALUES.items():
        assert fields[key].types[-1] == kind, key
        assert fields[key].contents() == (value.tolist() if isinstance(value, np.ndarray) else value), key


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 32), (3, 256)])
def test_tensors_are_read_by_the_package(tmp_path: Path, version: int, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(5)
    blocks = rng.integers(0, 256, (3, 2 * 210), dtype=np.uint8)
    floats = rng.standard_normal((5, 7)).astype(np.float32)
    tensors = [
        NewTensor("made.when.needed", GGMLType.Q6_K, (3, 512), lambda: blocks),
        NewTensor("floats", GGMLType.F32, (5, 7), floats),
    ]
    write_gguf(path, {"general.architecture": "llama"}, tensors, version=version, alignment=alignment)
    reader = gguf.GGUFReader(path)
    assert int(reader.fields["GGUF.version"].contents()) == version
    assert reader.alignment == alignment
    first, second = reader.tensors
    assert [first.name, second.name] == ["made.when.needed", "floats"]
    assert first.shape.tolist() == [512, 3]
    np.testing.assert_array_equal(first.data.reshape(3, -1), blocks)
    np.testing.assert_array_equal(second.data, floats)


def test_wrong_size_is_an_error(tmp_path: Path) -> None:
    tensor = NewTensor("t", GGMLType.F32, (4,), np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="12 bytes of data instead of 16"):
        write_gguf(tmp_path / "m.gguf", {}, [tensor])


@pytest.mark.parametrize("value", [None, {}, np.float16(1), np.zeros(2, np.complex64)])
def test_value_without_a_type_is_an_error(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match="GGUF has no type"):
        write_gguf(tmp_path / "m.gguf", {"key": value})
