"""Long texts take another way through the library: the same ids, and other threads run meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.tokenizer.gguf_tokenizer import GGUFTokenizer
from waits import HANG_S

WORDS = (" hello", " Grüße", " 42", " naïve", " 日本", " def")


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> GGUFTokenizer:
    return GGUFTokenizer(open_checkpoint(smollm2_path))


def test_ids_are_those_of_the_words(tokenizer: GGUFTokenizer) -> None:
    pieces = {word: tokenizer.encode(word, add_special=False) for word in WORDS}
    for count in (500, 683, 684, 5000):  # below and above where the other way starts
        words = [WORDS[number * number % len(WORDS)] for number in range(count)]
        assert tokenizer.encode("".join(words), add_special=False) == [
            index for word in words for index in pieces[word]
        ]


def test_other_threads_run_meanwhile(tokenizer: GGUFTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one takes many turns while the library encodes; with the interpreter's lock held it could take none."""
    text = " hello world" * 60_000
    encoding, ended = threading.Event(), threading.Event()
    encode_piece = tokenizer._encode_piece

    def noted(text: str) -> list[int]:
        encoding.set()
        try:
            return encode_piece(text)
        finally:
            ended.set()

    monkeypatch.setattr(tokenizer, "_encode_piece", noted)
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    thread.start()
    assert encoding.wait(HANG_S)
    turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 10
