"""SentencePiece's merging by score, against a merging that looks at every pair every time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.tokenizer.gguf_tokenizer import _Neighbours, merge_by_score
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.tokenizer import Tokenizer
from realizar.tokenizer.vocabulary import TokenType

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """The leftmost of the best pairs, again and again."""
    pieces = list(text)
    while True:
        best: tuple[float, int] | None = None
        for place in range(len(pieces) - 1):
            score = scores.get(pieces[place] + pieces[place + 1])
            if score is not None and (best is None or score > best[0]):
                best = (score, place)
        if best is None:
            return pieces
        place = best[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def build(scores: dict[str, float], **metadata: object) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *scores]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    kinds += [TokenType.NORMAL] * len(scores)
    return load_tokenizer(
        Checkpoint(
            Path("made-up.gguf"),
            "gguf",
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": np.array([0.0] * 259 + list(scores.values()), np.float32),
                "tokenizer.ggml.token_type": np.array(kinds, np.int32),
                "tokenizer.ggml.add_space_prefix": False,
                **metadata,
            },
            {},
        )
    )


def expected_ids(tokenizer: Tokenizer, text: str, scores: dict[str, float]) -> list[int]:
    ids = {tokenizer.token_text(index): index for index in range(tokenizer.vocab_size)}
    found: list[int] = []
    for piece in merged(text.replace(" ", "▁"), scores):
        found += [ids[piece]] if piece in scores else [ids[BYTES[byte]] for byte in piece.encode()]
    return found


words = st.text("ab▁é", min_size=1, max_size=5)
texts = st.text("ab é\n日", max_size=40)


@given(st.lists(words, min_size=1, max_size=30, unique=True), st.randoms(), texts)
def test_distinct_scores(pieces: list[str], random: object, text: str) -> None:
    """The vocabulary may lack parts of its tokens, and single characters."""
    numbers = [-float(place) for place in range(len(pieces))]
    random.shuffle(numbers)  # type: ignore[attr-defined]
    scores = dict(zip(pieces, numbers, strict=True))
    tokenizer = build(scores)
    assert tokenizer.encode(text, add_special=False) == expected_ids(tokenizer, text, scores)


@given(st.dictionaries(words, st.integers(-3, 0).map(float), min_size=1, max_size=30), texts)
def test_equal_scores(scores: dict[str, float], text: str) -> None:
    tokenizer = build(scores)
    assert tokenizer.encode(text, add_special=False) == expected_ids(tokenizer, text, scores)


@given(st.integers(1, 60))
def test_runs_that_share_a_score(size: int) -> None:
    scores = {"▁" * length: -1e9 for length in range(2, 17)} | {"▁": -1e9, "a": -1.0, "▁a": -2.0}
    tokenizer = build(scores)
    text = " " * size + "a"
    assert tokenizer.encode(text, add_special=False) == expected_ids(tokenizer, text, scores)


def test_the_leftmost_of_equals_is_merged() -> None:
    assert merge_by_score("bab", {"a": 0.0, "b": 0.0, "ab": 0.0, "ba": 0.0}) == ["ba", "b"]


@given(st.text("ab일本🙂\n", max_size=30))
def test_a_text_is_cut_where_no_token_has_both_characters(text: str) -> None:
    tokens = ["ab", "b일", "일本", "aaa", "🙂"]
    pieces = list(_Neighbours(tokens).cut(text))
    assert "".join(pieces) == text
    joined = {token[place : place + 2] for token in tokens for place in range(len(token) - 1)}
    assert all(pair in joined for piece in pieces for pair in map("".join, pairwise(piece)))
    assert not any(one[-1] + other[0] in joined for one, other in pairwise(pieces))


@pytest.mark.parametrize("text", ["a", "é", "aéé🙂a", "éa é"])
def test_characters_that_a_vocabulary_without_bytes_lacks(text: str) -> None:
    """Several in a row are one unknown token, as in SentencePiece."""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "▁"],
        "tokenizer.ggml.scores": np.zeros(5, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1], np.int32),
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = load_tokenizer(Checkpoint(Path("made-up.gguf"), "gguf", metadata, {}))
    expected = {"a": [3], "é": [0], "aéé🙂a": [3, 0, 3], "éa é": [0, 3, 4, 0]}[text]
    assert tokenizer.encode(text, add_special=False) == expected


@pytest.mark.parametrize("prefix", [True, False])
def test_space_prefix_after_special_tokens(prefix: bool) -> None:
    scores = {"a": -1.0, "▁": -2.0, "▁a": -3.0}
    tokenizer = build(scores, **{"tokenizer.ggml.add_space_prefix": prefix})
    texts = [tokenizer.token_text(index) for index in tokenizer.encode("a<s>a a")]
    first = "▁a" if prefix else "a"
    assert texts == ["<s>", first, "<s>", first, "▁a"]
    ids = tokenizer.encode("a a", add_special=False)
    assert tokenizer.decode(ids, remove_space_prefix=True) == "a a"
    assert tokenizer.decode(ids) == (" a a" if prefix else "a a")
    spelled = tokenizer.encode("</s>", add_special=False, parse_special=False)
    assert not any(tokenizer.is_special(index) for index in spelled)
