"""A small model for ranks of any device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ranks") / "tiny.gguf"
    write_tiny_model(found)
    return found
