"""Kernels that are compiled beside a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realizar.backends import select
from realizar.cli.options.loading import fetch_model
from realizar.config import EngineConfig
from realizar.errors import CapacityError
from realizar.hub import pull
from tiny_model import write_tiny_model


@pytest.mark.parametrize(("num_reports", "loads", "num_begun"), [(3, True, 1), (0, True, 0), (3, False, 0)])
def test_kernels_are_compiled_beside_a_download(
    num_reports: int, loads: bool, num_begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and only before a load; a device that is not there is named by the load alone."""
    write_tiny_model(tmp_path / "tiny.gguf")
    begun: list[EngineConfig] = []

    def resolved(_name: str, progress: Any, *_room: object, **_options: object) -> Path:
        for done in range(num_reports):
            progress("tiny", done, num_reports)
        return tmp_path / "tiny.gguf"

    def begin(config: EngineConfig) -> None:
        begun.append(config)
        raise CapacityError("no GPU")

    monkeypatch.setattr(pull, "resolve", resolved)
    monkeypatch.setattr(select, "begin_compiling", begin)
    config = EngineConfig(threads=1)
    assert fetch_model("tiny", loads_with=config if loads else None).path == tmp_path / "tiny.gguf"
    assert begun == [config] * num_begun
