"""The model of the servers that tests start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from realizar.cli.main import app, run_app
from tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of random weights, with a vocabulary."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `realizar serve` says, in this process, of words with which it can't start."""

    def refuse(*words: str | Path) -> str:
        assert run_app(app, ["serve", *map(str, words), "--port", "0"]) == 1
        return capsys.readouterr().err

    return refuse
