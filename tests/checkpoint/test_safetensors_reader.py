"""Files written by the `safetensors` library, read back equal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.open import open_checkpoint
from realizar.checkpoint.safetensors import INDEX_NAME
from realizar.errors import CheckpointError

CONFIG = {"model_type": "llama", "hidden_size": 8}
RNG = np.random.default_rng(7)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "a.weight": RNG.standard_normal((4, 6)).astype(np.float32),
    "b.weight": RNG.standard_normal((2, 3, 5)).astype(np.float16),
    "c.weight": RNG.standard_normal((7,)),
    "d.ids": np.arange(9, dtype=np.int64).reshape(3, 3),
    "e.scalar": np.array(1.5, np.float32),
    "f.empty": np.zeros((0, 4), np.float32),
}
TYPES = {"a": GGMLType.F32, "b": GGMLType.F16, "c": GGMLType.F64, "d": GGMLType.I64, "e": GGMLType.F32}


def _config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


def _shard(folder: Path, count: int = 2) -> dict[str, str]:
    """`ARRAYS` spread over `count` files, with their index."""
    weight_map = {}
    for number in range(count):
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(ARRAYS.items())[number::count])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    _write_index(folder, weight_map)
    return weight_map


def _write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def _assert_arrays(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == "safetensors"
    assert set(checkpoint.tensors) == set(ARRAYS)
    for name, array in ARRAYS.items():
        tensor = checkpoint.tensors[name]
        assert tensor.shape == array.shape
        assert tensor.ggml_type is TYPES.get(name[0], GGMLType.F32)
        assert tensor.data.tobytes() == array.tobytes()
        assert tensor.path.read_bytes()[tensor.offset : tensor.offset + tensor.size_bytes] == array.tobytes()
        tensor.prefetch()
        tensor.release()
        assert tensor.data.tobytes() == array.tobytes()
    assert checkpoint.size_bytes == sum(array.nbytes for array in ARRAYS.values())


@pytest.mark.parametrize("by", ["folder", "file"])
def test_single_file(tmp_path: Path, by: str) -> None:
    save_file(ARRAYS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _config(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path if by == "folder" else tmp_path / "model.safetensors"
    _assert_arrays(path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.path == tmp_path
    assert checkpoint.metadata == {"config": CONFIG}
    assert checkpoint.tokenizer_path == tmp_path / "tokenizer.json"


def test_file_of_another_name(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "consolidated.safetensors")
    _assert_arrays(tmp_path)
    _assert_arrays(tmp_path / "consolidated.safetensors")
    assert open_checkpoint(tmp_path).tokenizer_path is None


def test_file_without_suffix(tmp_path: Path) -> None:
    save_file(ARRAYS, tmp_path / "blob")
    _assert_arrays(tmp_path / "blob")


@pytest.mark.parametrize("by", ["folder", "index", "shard"])
def test_shards(tmp_path: Path, by: str) -> None:
    _shard(tmp_path, 3)
    names = {"folder": "", "index": INDEX_NAME, "shard": "model-00002-of-00003.safetensors"}
    _assert_arrays(tmp_path / names[by])


def test_shards_linked_into_the_hub_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    _shard(snapshot)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(os.path.relpath(blobs / str(number), snapshot))
    _assert_arrays(snapshot)


def test_bf16(tmp_path: Path) -> None:
    """numpy has no bfloat16, so the file is laid down by hand and read by the library too."""
    words = np.arange(6, dtype=np.uint16) + 0x3F80
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + words.tobytes())
    ((name, theirs),) = safetensors.deserialize(path.read_bytes())
    ours = open_checkpoint(path).tensors[name]
    assert ours.ggml_type is GGMLType.BF16
    assert ours.shape == tuple(theirs["shape"])
    assert ours.data.tobytes() == bytes(theirs["data"])


def test_dtypes_without_ggml_id_keep_their_name_and_bytes(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32), "mask": np.ones(3, np.bool_), "u": np.ones(3, np.uint8)}, tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    types = {name: (tensor.ggml_type, tensor.type_name) for name, tensor in checkpoint.tensors.items()}
    assert types == {"w": (GGMLType.F32, "F32"), "mask": (None, "BOOL"), "u": (None, "U8")}
    assert checkpoint.tensors["u"].data.tolist() == [1, 1, 1]
    assert checkpoint.size_bytes == 8 + 3 + 3


def test_tensor_that_the_index_does_not_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight_map = _shard(tmp_path)
    del weight_map["a.weight"]
    _write_index(tmp_path, weight_map)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tensors) == set(ARRAYS) - {"a.weight"}
    assert "a.weight" in caplog.text


def test_folder_with_tokenizer_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.tensors
    assert checkpoint.tokenizer_path == tmp_path / "tokenizer.json"


OUTSIDE = "lies outside the folder"


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("../other/model.safetensors", OUTSIDE),
        ("sub/../../other/model.safetensors", OUTSIDE),
        ("/etc/passwd.safetensors", OUTSIDE),
        ("link.safetensors", OUTSIDE),
        ("linked/model.safetensors", OUTSIDE),
        ("..\\other\\model.safetensors", "not a name of a safetensors file"),
        ("a\0.safetensors", "not a name of a safetensors file"),
        ("\ud800.safetensors", "not a name of a safetensors file"),
        ("pytorch_model.bin", "not a name of a safetensors file"),
        ("", "not a name of a safetensors file"),
        (".safetensors", "not a name of a safetensors file"),
        (7, "its file name is not text"),
        (None, "its file name is not text"),
    ],
)
def test_index_that_points_elsewhere(tmp_path: Path, file: object, reason: str) -> None:
    folder, other = tmp_path / "model", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    save_file(ARRAYS, other / "model.safetensors")
    (folder / "link.safetensors").symlink_to(other / "model.safetensors")
    (folder / "linked").symlink_to(other)
    _write_index(folder, {"a.weight": file})
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(folder)
    assert str(refusal.value).startswith(f"{folder / INDEX_NAME}: tensor 'a.weight': ")
    assert reason in str(refusal.value)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x", {"a": []}])
def test_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    _write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"weight_map|its file name is not text"):
        open_checkpoint(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    _shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: file: missing") as refusal:
        open_checkpoint(tmp_path)
    assert "b.weight" in str(refusal.value)


def test_missing_tensor(tmp_path: Path) -> None:
    weight_map = _shard(tmp_path)
    _write_index(tmp_path, weight_map | {"z.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"tensor 'z\.weight': model-00001-of-00002\.safetensors does not hold it"
    ):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    _shard(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="several safetensors files and no"):
        open_checkpoint(tmp_path)
