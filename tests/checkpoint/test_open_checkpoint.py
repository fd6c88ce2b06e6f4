"""`open_checkpoint` judges content, not names."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from realizar.checkpoint.gguf_writer import write_gguf
from realizar.checkpoint.open import find_tower_file, open_checkpoint
from realizar.errors import CheckpointError

PICKLE = "convert the model to safetensors or GGUF"


def _gguf(path: Path) -> Path:
    write_gguf(path, {"general.architecture": "llama"})
    return path


@pytest.mark.parametrize("name", ["model.gguf", "blob", "model.bin", "model.safetensors"])
def test_gguf_under_any_name(tmp_path: Path, name: str) -> None:
    assert open_checkpoint(str(_gguf(tmp_path / name))).format == "gguf"


@pytest.mark.parametrize("name", ["model.safetensors", "blob", "model.gguf"])
def test_safetensors_under_any_name(tmp_path: Path, name: str) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / name)
    assert open_checkpoint(tmp_path / name).format == "safetensors"


def test_folder_with_one_gguf_model(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "some.gguf")
    assert open_checkpoint(tmp_path).path == path


def test_folder_with_a_split_gguf_model(tmp_path: Path) -> None:
    for index in range(2):
        metadata = {"split.no": np.uint16(index), "split.count": np.uint16(2), "general.architecture": "llama"}
        write_gguf(tmp_path / f"m-{index + 1:05}-of-00002.gguf", metadata)
    assert open_checkpoint(tmp_path).path.name == "m-00001-of-00002.gguf"


def test_folder_with_a_gguf_model_and_what_lies_beside_it(tmp_path: Path) -> None:
    path = _gguf(tmp_path / "some-Q4_K_M.gguf")
    for name in ("mmproj-F16.gguf", "mtp-some.gguf", "some-EAGLE3-F16.gguf"):
        _gguf(tmp_path / name)
    assert open_checkpoint(tmp_path).path == path


def test_a_tower_lies_beside_a_model_or_above_its_quantisations_folder(tmp_path: Path) -> None:
    tower, lesser = _gguf(tmp_path / "mmproj-F16.gguf"), _gguf(tmp_path / "mmproj-F32.gguf")
    for folder, found in ((".", tower), ("Q8_0", tower), ("models", None)):
        (tmp_path / folder).mkdir(exist_ok=True)
        assert find_tower_file(open_checkpoint(_gguf(tmp_path / folder / "m.gguf"))) == found
    tower.unlink()
    assert find_tower_file(open_checkpoint(tmp_path / "m.gguf")) == lesser
    assert find_tower_file(open_checkpoint(lesser)) is None


def test_folder_with_two_gguf_models(tmp_path: Path) -> None:
    _gguf(tmp_path / "a.gguf")
    _gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF models; name one of them: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("kind", ["zip", "pickle"])
@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("pytorch_model.bin", "folder"),
        ("pytorch_model.bin", "file"),
        ("model.pt", "folder"),
        ("model.pth", "folder"),
        ("model.safetensors", "file"),
        ("model", "file"),
    ],
)
def test_pickles_are_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str, by: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / name
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.pkl", pickle.dumps(_Bomb()))
    else:
        path.write_bytes(pickle.dumps(_Bomb()))
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=PICKLE) as refusal:
        open_checkpoint(path if by == "file" else folder)
    assert str(refusal.value).startswith(f"{path}: ")
    assert not (tmp_path / "exploded").exists()


def test_pickle_of_unknown_content_is_refused_by_suffix(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"something else")
    with pytest.raises(CheckpointError, match=PICKLE):
        open_checkpoint(tmp_path / "x.pt")


def test_pickles_beside_safetensors_do_not_matter(tmp_path: Path) -> None:
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert set(open_checkpoint(tmp_path).tensors) == {"w"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"lmgg" + bytes(60), "before GGUF"),
        (b"tjgg" + bytes(60), "before GGUF"),
        (b"FUGG" + bytes(60), "byte-swapped"),
        (b"hello", "not a GGUF file"),
        (b"<!DOCTYPE html><html>", "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "this is a Git LFS pointer; fetch the file"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(tmp_path / "model.gguf")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder has no GGUF or safetensors model"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        open_checkpoint(tmp_path / "none.gguf")
