"""Vocabularies under tests/data/tokenizers, unpacked once, and what llama.cpp made of some texts with them."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "data" / "tokenizers"


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """A vocabulary-only GGUF file by name."""
    folder = tmp_path_factory.mktemp("vocabularies")

    @cache
    def unpack(name: str) -> Checkpoint:
        path = folder / f"{name}.gguf"
        path.write_bytes(lzma.decompress((DATA / f"{name}.gguf.xz").read_bytes()))
        return open_checkpoint(path)

    return unpack


@pytest.fixture(scope="session")
def tokenizer_of(vocabulary: Callable[[str], Checkpoint]) -> Callable[[str], Tokenizer]:
    return cache(lambda name: load_tokenizer(vocabulary(name)))


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    """Texts and llama.cpp's token ids for them (build 11434), per vocabulary and per pre-tokenizer."""
    return json.loads(lzma.decompress((DATA / "recorded.json.xz").read_bytes()))


@pytest.fixture(scope="session")
def prompts() -> dict[str, Any]:
    """Prompts, their token ids and continuations, and chat prompts, as llama.cpp's server gave them."""
    return json.loads((DATA / "prompts.json").read_text(encoding="utf-8"))
