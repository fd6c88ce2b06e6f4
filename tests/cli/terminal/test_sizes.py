"""One way to write a number of bytes, and one size for a model wherever it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import realizar as realizar_package
from realizar.cli.terminal.progress import download_progress
from realizar.hub.pull import BUILTIN_MODELS
from realizar.sizes import format_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (23_040, "23.0 kB"), (999_949, "999.9 kB"), (999_999, "1.0 MB"),
        (98_362_432, "98.4 MB"), (999_990_000, "1.00 GB"), (1_510_000_000, "1.51 GB"), (2 * 10**12, "2.00 TB"),
    ],
)  # fmt: skip
def test_units(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_a_model_has_one_size(
    realizar: Callable[..., Any], smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = format_bytes(BUILTIN_MODELS["smollm2:135m"].size_bytes)
    listed = next(line for line in realizar("list").stdout.splitlines() if line.startswith("smollm2:135m"))
    assert f" {shown} " in listed
    assert f"size          {shown}, 272 tensors" in realizar("inspect", smollm2_path).stdout
    assert f"file         {shown}" in realizar("plan", smollm2_path, "--device", "cpu").stdout
    with download_progress() as progress:
        progress("smollm2:135m", 0, BUILTIN_MODELS["smollm2:135m"].size_bytes)
    assert capsys.readouterr().err == f"fetching smollm2:135m ({shown})\n"


def test_no_message_writes_sizes_in_a_way_of_its_own() -> None:
    """Exempt are readers of files, whose limits are powers of two, and tables with a unit in their head."""
    root = Path(realizar_package.__file__).parent
    own = re.compile(r">> [23]0\}|/ 1e[69]:[^}]*\} [MG]B\b(?!/s)|/ 1024:")
    allowed = {"checkpoint", "bench"}
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in allowed and own.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["cli/commands/run.py"], "which counts characters"
