"""The model of the servers that tests start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights, with a vocabulary."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path
