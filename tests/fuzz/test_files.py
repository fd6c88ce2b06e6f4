"""Hostile model files: a seed says what they hold, the whole ones can be used, and a wrong outcome is a fault."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from fuzz import read_files
from fuzz.files import hostile_model, whole_model
from fuzz.read_files import faults, read_model


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_whole_models_are_read(form: str, tmp_path: Path) -> None:
    assert read_model(whole_model(form), tmp_path, run=False) == "read"


def test_a_seed_says_what_files_hold() -> None:
    made = [hostile_model(Random(f"1/{index}")) for index in range(20)]
    assert made == [hostile_model(Random(f"1/{index}")) for index in range(20)]
    assert len({tuple(sorted(files.items())) for files in made}) > 15


def test_files_of_a_seed_harm_nobody() -> None:
    notes: list[str] = []
    assert list(faults(7, 0, 40, notes=notes)) == []
    assert len(notes) == 40
    assert 3 < notes.count("'read'") < 35, "some load, some do not"


def test_what_ends_or_stops_the_process_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_files, "_HANGS_S", 0.0)
    monkeypatch.setattr(read_files.subprocess.Popen, "wait", _killed)
    assert list(faults(7, 3, 1)) == [
        "python -m fuzz.read_files --seed 7 --first 3 --count 1: the process ended with status -9"
    ]


def _killed(process: read_files.subprocess.Popen[bytes], timeout: float | None = None) -> int:
    process.kill()
    return process._wait(timeout)  # type: ignore[attr-defined]


def test_another_exception_and_an_odd_line_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.checkpoint.open.open_checkpoint", {}.__getitem__)
    with pytest.raises(KeyError):
        read_model(whole_model("gguf"), tmp_path, run=False)
    monkeypatch.undo()
    monkeypatch.setattr("realizar.cli.commands.inspect._report", lambda *_: ["\x1b[2J"])
    with pytest.raises(AssertionError, match="not printable"):
        read_model(whole_model("gguf"), tmp_path, run=False)
