"""Long texts take another way through the library: the same ids, and other threads run meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.tokenizer import Tokenizer

WORDS = (" hello", " Grüße", " 42", " naïve", " 日本", " def")


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(smollm2_path))


def test_ids_are_those_of_the_words(tokenizer: Tokenizer) -> None:
    pieces = {word: tokenizer.encode(word, add_special=False) for word in WORDS}
    for count in (500, 683, 684, 5000):  # below and above where the other way starts
        words = [WORDS[number * number % len(WORDS)] for number in range(count)]
        assert tokenizer.encode("".join(words), add_special=False) == [
            index for word in words for index in pieces[word]
        ]


def test_other_threads_run_meanwhile(tokenizer: Tokenizer) -> None:
    text = " hello world" * 60_000
    started = time.perf_counter()
    thread = threading.Thread(target=tokenizer.encode, args=(text,))
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert longest < 0.5 * (last - started)
