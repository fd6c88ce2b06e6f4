"""The files of a checkpoint, looked at again: gone, cut short, replaced, or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realizar.checkpoint.model_files import ModelFiles
from realizar.checkpoint.open import open_checkpoint
from tiny_model import write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    return path


def test_what_can_happen_to_a_file(model: Path) -> None:
    files = ModelFiles(open_checkpoint(model))
    good, signature = model.read_bytes(), files.signature()
    assert files.fault() is None
    model.unlink()
    assert files.fault() == "tiny.gguf is gone"
    assert files.signature() != signature
    model.write_bytes(good[:1000])
    assert files.fault() == f"tiny.gguf has 1000 bytes instead of {len(good)}"
    model.write_bytes(good[:600] + b"x" + good[601:])
    assert str(files.fault()).startswith("tiny.gguf is another file than when the server was started")
    model.write_bytes(good)
    assert files.fault() is None
    assert files.signature() != signature
    signature = files.signature()
    model.write_bytes(good[:-1] + b"\0")  # weights are not read: loading them tells
    assert files.fault() is None
    os.utime(model, (1, 1))
    assert files.signature() != signature


def test_refusals_name_no_folder_to_clients(model: Path) -> None:
    assert ModelFiles(open_checkpoint(model)).shown(f"{model}: offset 3: bad") == "tiny.gguf: offset 3: bad"


def test_a_folders_settings_are_part_of_it(tmp_path: Path, smollm2_path: Path) -> None:
    """A folder with one GGUF model: JSON beside it is read whole."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.gguf").symlink_to(smollm2_path)
    files = ModelFiles(open_checkpoint(folder))
    assert files.fault() is None
    (folder / "model.gguf").unlink()
    assert files.fault() == "model.gguf is gone"
