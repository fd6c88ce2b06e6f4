"""Files written by the PyPI `gguf` package, and the real models, read back equal."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf import read_gguf
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.errors import CheckpointError

ARCHITECTURE = {"general.architecture": "llama"}


def _save(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "meta.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "naïve 🙂\n")
    writer.add_array("words", ["a", "", "ö"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("nested", [[1, 2], [3]])
    _save(writer)

    metadata = read_gguf(path).metadata
    scalars = {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 4_000_000_000,
        "i32": -2_000_000_000,
        "u64": 1 << 63,
        "i64": -(1 << 62),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "no": False,
        "text": "naïve 🙂\n",
        "words": ["a", "", "ö"],
    }
    for key, value in scalars.items():
        assert metadata[key] == value, key
        assert type(metadata[key]) is type(value), key
    assert metadata["ints"].dtype == np.int32
    assert metadata["ints"].tolist() == [1, -2, 3]
    assert metadata["floats"].dtype == np.float32
    assert metadata["floats"].tolist() == [0.5, -1.5]
    assert metadata["bools"].dtype == np.bool_
    assert metadata["bools"].tolist() == [True, False]
    assert [inner.tolist() for inner in metadata["nested"]] == [[1, 2], [3]]


def test_arrays_of_every_number_type(tmp_path: Path) -> None:
    """The package writes a few array types only, so bytes are laid down here."""
    codes = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
    body = bytearray(b"GGUF" + struct.pack("<IQQ", 3, 0, len(codes) + 1))
    for key, kind, payload in [
        ("general.architecture", 8, struct.pack("<Q", 1) + b"x"),
        *[
            (name, 9, struct.pack("<IQ", code, 3) + np.arange(7, 10).astype(name).tobytes())
            for code, name in codes.items()
        ],
    ]:
        body += struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + payload
    path = tmp_path / "arrays.gguf"
    path.write_bytes(body)
    metadata = read_gguf(path).metadata
    for name in codes.values():
        assert metadata[name].dtype == np.dtype(name)
        assert metadata[name].tolist() == [7, 8, 9]
        assert metadata[name].flags.aligned


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096, 1 << 20])
def test_tensors_at_any_alignment(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "tensors.gguf"
    rng = np.random.default_rng(1)
    floats = rng.standard_normal((3, 5)).astype(np.float32)
    cube = rng.standard_normal((2, 3, 4, 5)).astype(np.float16)
    blocks = rng.integers(0, 256, (4, 2 * 144), dtype=np.uint8)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_tensor("floats", floats)
    writer.add_tensor("cube", cube)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    _save(writer)

    tensors = read_gguf(path).tensors
    assert list(tensors) == ["floats", "cube", "blocks"]
    assert tensors["floats"].shape == (3, 5)
    assert tensors["floats"].ggml_type is GGMLType.F32
    np.testing.assert_array_equal(tensors["floats"].data.view(np.float32).reshape(3, 5), floats)
    assert tensors["cube"].shape == (2, 3, 4, 5)
    np.testing.assert_array_equal(tensors["cube"].data.view(np.float16).reshape(cube.shape), cube)
    assert tensors["blocks"].shape == (4, 512)
    assert tensors["blocks"].ggml_type is GGMLType.Q4_K
    np.testing.assert_array_equal(tensors["blocks"].data.reshape(blocks.shape), blocks)
    assert all(tensor.offset % alignment == 0 for tensor in tensors.values())


def _one_of_each() -> list[NewTensor]:
    rng = np.random.default_rng(2)
    tensors = []
    for kind in GGMLType:
        data = rng.integers(0, 256, 3 * 2 * kind.type_size, dtype=np.uint8)
        tensors.append(NewTensor(f"t.{kind.name}", kind, (3, 2 * kind.block_size), data))
    return tensors


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 32), (3, 1), (3, 2), (2, 16384)])
def test_every_type_id_round_trips(tmp_path: Path, version: int, alignment: int) -> None:
    path, written = tmp_path / "all.gguf", _one_of_each()
    write_gguf(path, ARCHITECTURE, written, version=version, alignment=alignment)
    checkpoint = read_gguf(path)
    _assert_equal(checkpoint, written)
    raw = path.read_bytes()
    for tensor in checkpoint.tensors.values():
        assert raw[tensor.offset : tensor.offset + tensor.size_bytes] == tensor.data.tobytes()


def _assert_equal(checkpoint: Checkpoint, written: list[NewTensor]) -> None:
    assert list(checkpoint.tensors) == [tensor.name for tensor in written]
    for new in written:
        stored = checkpoint.tensors[new.name]
        assert not callable(new.data)
        assert (stored.ggml_type, stored.shape) == (new.ggml_type, new.shape)
        np.testing.assert_array_equal(stored.data, new.data)
    assert checkpoint.size_bytes == sum(tensor.size_bytes for tensor in written)


def test_vocabulary_only_file(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(["<s>", "a", "▁b"])
    writer.add_token_scores([0.0, -1.0, -2.0])
    _save(writer)
    checkpoint = read_gguf(path)
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == ["<s>", "a", "▁b"]
    assert not checkpoint.tensors
    assert checkpoint.size_bytes == 0


def test_views_are_read_only_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    path, written = tmp_path / "all.gguf", _one_of_each()
    write_gguf(path, ARCHITECTURE, written)
    data = read_gguf(path).tensors["t.Q4_0"].data
    assert data.tobytes() == bytes(next(t.data for t in written if t.name == "t.Q4_0"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def _resident_bytes(path: Path) -> int:
    """Bytes of the file's mapping that this process holds in memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and not line.split(" ", 1)[0].endswith(":"):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_release_gives_pages_back_and_keeps_the_view(tmp_path: Path) -> None:
    path, size = tmp_path / "big.gguf", 8 << 20
    data = np.random.default_rng(3).integers(0, 256, size, dtype=np.uint8)
    write_gguf(path, ARCHITECTURE, [NewTensor("a", GGMLType.I8, (size,), data)])
    checkpoint = read_gguf(path)
    tensor = checkpoint.tensors["a"]
    assert _resident_bytes(path) < 1 << 20
    tensor.prefetch()
    assert int(tensor.data.sum(dtype=np.int64)) == int(data.sum(dtype=np.int64))
    assert _resident_bytes(path) >= size
    tensor.release()
    assert _resident_bytes(path) < 1 << 20
    np.testing.assert_array_equal(tensor.data, data)


def _write_parts(folder: Path, count: int, *, total: int | None = None) -> tuple[Path, list[NewTensor]]:
    tensors = _one_of_each()
    share = -(-len(tensors) // count)
    for index in range(count):
        metadata: dict[str, Any] = {
            "split.no": np.uint16(index),
            "split.count": np.uint16(count),
            "split.tensors.count": np.int32(len(tensors) if total is None else total),
        }
        if index == 0:
            metadata |= ARCHITECTURE
        part = tensors[index * share : (index + 1) * share]
        write_gguf(folder / f"model-{index + 1:05}-of-{count:05}.gguf", metadata, part)
    return folder / f"model-00001-of-{count:05}.gguf", tensors


def test_split_files_open_from_the_first_part(tmp_path: Path) -> None:
    path, written = _write_parts(tmp_path, 3)
    checkpoint = read_gguf(path)
    _assert_equal(checkpoint, written)
    assert checkpoint.metadata["general.architecture"] == "llama"
    last = checkpoint.tensors[written[-1].name]
    assert last.path.name == "model-00003-of-00003.gguf"
    last.release()


def test_split_written_by_the_package(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    arrays = {f"t{i}": np.full((2, 3), i, np.float32) for i in range(5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    _save(writer)
    checkpoint = read_gguf(tmp_path / "m-00001-of-00003.gguf")
    assert list(checkpoint.tensors) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].data.view(np.float32).reshape(2, 3), array)


def _later_part(folder: Path) -> Path:
    _write_parts(folder, 3)
    return folder / "model-00002-of-00003.gguf"


def _missing_part(folder: Path) -> Path:
    path, _ = _write_parts(folder, 3)
    (folder / "model-00003-of-00003.gguf").unlink()
    return path


def _wrong_total(folder: Path) -> Path:
    return _write_parts(folder, 2, total=99)[0]


def _renamed(folder: Path) -> Path:
    return _write_parts(folder, 2)[0].rename(folder / "model.gguf")


def _swapped(folder: Path) -> Path:
    path, _ = _write_parts(folder, 3)
    second, third = folder / "model-00002-of-00003.gguf", folder / "model-00003-of-00003.gguf"
    second.write_bytes(third.read_bytes())
    return path


def _same_tensor_twice(folder: Path) -> Path:
    tensor = NewTensor("twice", GGMLType.F32, (1,), np.ones(1, np.float32))
    for index in range(2):
        metadata = ARCHITECTURE | {"split.no": np.uint16(index), "split.count": np.uint16(2)}
        write_gguf(folder / f"m-{index + 1:05}-of-00002.gguf", metadata, [tensor])
    return folder / "m-00001-of-00002.gguf"


def _count_of_wrong_type(folder: Path) -> Path:
    path = folder / "m-00001-of-00002.gguf"
    write_gguf(path, ARCHITECTURE | {"split.count": [1, 2]})
    return path


def _whole_file(split: dict[str, Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "m.gguf"
        write_gguf(path, ARCHITECTURE | {f"split.{key}": np.uint16(value) for key, value in split.items()}, [])
        return path

    return make


def test_a_file_merged_from_parts_opens(tmp_path: Path) -> None:
    assert not read_gguf(_whole_file({"no": 0, "count": 0, "tensors.count": 0})(tmp_path)).tensors


@pytest.mark.parametrize(
    ("make", "file", "message"),
    [
        (_whole_file({"no": 1}), "m.gguf", "key 'split.no': this is part 2 of a model whose split.count is missing"),
        (
            _whole_file({"no": 3, "count": 0}),
            "m.gguf",
            "key 'split.no': this is part 4 of a model whose split.count is 0",
        ),
        (
            _whole_file({"no": 2, "count": 2}),
            "m.gguf",
            "key 'split.no': this is part 3 of a model whose split.count is 2",
        ),
        (_whole_file({"tensors.count": 5}), "m.gguf", "5 tensors are announced, but the model has 0"),
        (_later_part, "model-00002-of-00003.gguf", "part 2 of 3; open the first part"),
        (_missing_part, "model-00003-of-00003.gguf", "part 3 of 3 is missing"),
        (_wrong_total, "model-00001-of-00002.gguf", "99 tensors are announced, but the model has 35"),
        (_renamed, "model.gguf", "name must end in -00001-of-00002.gguf"),
        (_swapped, "model-00002-of-00003.gguf", "this is not part 2 of 3"),
        (_same_tensor_twice, "m-00002-of-00002.gguf", "tensor 'twice': duplicate tensor, already in m-00001"),
        (_count_of_wrong_type, "m-00001-of-00002.gguf", "key 'split.count': must be a whole number"),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_broken_split_is_refused(tmp_path: Path, make: Any, file: str, message: str) -> None:
    path = make(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        read_gguf(path)
    assert file in str(refusal.value).split(": ")[0]
    assert message in str(refusal.value)


def _assert_equals_package(path: Path) -> None:
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        value, field = ours.metadata[key], theirs.fields[key]
        if len(field.data) > 1000 and isinstance(value, list):  # Vocabularies: by their bytes, which is quicker.
            assert [text.encode() for text in value] == [bytes(field.parts[index]) for index in field.data]
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, np.concatenate([field.parts[index] for index in field.data]))
        else:
            assert value == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert stored.shape == tuple(int(size) for size in tensor.shape[::-1])
        assert (stored.ggml_type, stored.offset) == (int(tensor.tensor_type), tensor.data_offset)
        assert stored.size_bytes == tensor.n_bytes
        np.testing.assert_array_equal(stored.data, tensor.data.reshape(-1).view(np.uint8))
        stored.release()


def test_smollm2_equals_package(smollm2_path: Path) -> None:
    _assert_equals_package(smollm2_path)


@pytest.mark.full  # The package takes a quarter of a minute to read 262,144 tokens.
def test_gemma3_equals_package(gemma3_path: Path) -> None:
    _assert_equals_package(gemma3_path)
