"""Runs command lines in this process, and makes small model files for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from realizar.checkpoint.gguf_writer import write_gguf
from realizar.cli.main import app, run_app
from realizar.models.generated.generate import generate_gguf
from tiny_model import byte_symbols, write_tiny_model


@dataclass(frozen=True)
class Result:
    """The status and the output of a command."""

    status: int
    stdout: str
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("realizar: ")]


@pytest.fixture
def realizar(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Call it with the words of a command line."""

    def call(*arguments: str | Path) -> Result:
        capsys.readouterr()
        status = run_app(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def weights_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two small layers without a vocabulary."""
    path = tmp_path_factory.mktemp("models") / "weights-only.gguf"
    generate_gguf("tiny", path, "q4_k_m")
    return path


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small layers of random weights, a vocabulary of bytes, a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def vocabulary_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte-level BPE: id b is byte b, 256 is `he`, 257 a control token. No weights."""
    path = tmp_path_factory.mktemp("models") / "vocabulary-only.gguf"
    tokens = [*byte_symbols(), "he", "<|end|>"]
    metadata = {
        "general.architecture": "gpt2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.eos_token_id": 257,
    }
    write_gguf(path, metadata)
    return path
