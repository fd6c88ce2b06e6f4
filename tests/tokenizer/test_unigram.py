"""The unigram model against a search over all segmentations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.tokenizer.load import load_tokenizer
from realizar.tokenizer.tokenizer import Tokenizer

SPECIAL = ["<pad>", "</s>", "<unk>"]


def build(scores: dict[str, float], **flags: bool) -> Tokenizer:
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [*SPECIAL, *scores],
        "tokenizer.ggml.scores": np.array([0.0] * 3 + list(scores.values()), np.float32),
        "tokenizer.ggml.token_type": np.array([3, 3, 2] + [1] * len(scores), np.int32),
        **{f"tokenizer.ggml.{name}": value for name, value in flags.items()},
    }
    return load_tokenizer(Checkpoint(Path("made-up.gguf"), "gguf", metadata, {}))


def best_score(text: str, scores: dict[str, float]) -> float:
    """The best score of all segmentations; a character that is no token costs ten more than the worst token."""
    unknown = min(scores.values()) - 10
    best = [0.0] + [-np.inf] * len(text)
    for end in range(1, len(text) + 1):
        for start in range(end):
            piece = text[start:end]
            score = scores.get(piece, unknown if end - start == 1 else -np.inf)
            best[end] = max(best[end], best[start] + score)
    return best[-1]


@given(
    st.dictionaries(st.text("abc▁", min_size=1, max_size=4), st.floats(-9, -0.5, width=16), min_size=1, max_size=12),
    st.text("abcx ", max_size=20),
)
def test_best_segmentation(scores: dict[str, float], text: str) -> None:
    tokenizer = build(scores)
    ids = tokenizer.encode(text, add_special=False)
    escaped = text.replace(" ", "▁")
    pieces = [tokenizer.token_text(index) for index in ids]
    best = best_score(escaped, scores)
    if "<unk>" not in pieces:
        assert "".join(pieces) == escaped
        assert abs(sum(scores[piece] for piece in pieces) - best) < 1e-3
    else:
        assert best <= min(scores.values()) - 10, "a segmentation without unknown characters would be better"


def test_spaces_and_ends() -> None:
    scores = {"▁": -2.0, "▁a": -1.0, "a": -3.0, "b": -1.0, "▁b": -1.5}
    merged = build(scores, add_space_prefix=True, remove_extra_whitespaces=True)
    texts = [merged.token_text(index) for index in merged.encode("  a   b ")]
    assert texts == ["▁a", "▁b", "</s>"]
    kept = build(scores, add_space_prefix=True, remove_extra_whitespaces=False)
    assert [kept.token_text(index) for index in kept.encode("a  b", add_special=False)] == ["▁a", "▁", "▁b"]
    plain = build(scores, add_space_prefix=False, add_eos_token=False)
    assert [plain.token_text(index) for index in plain.encode("a b")] == ["a", "▁b"]
    assert plain.encode("") == []
    assert plain.decode(plain.encode("a b a")) == "a b a"


def test_unknown_runs_are_one_token() -> None:
    tokenizer = build({"a": -1.0})
    assert tokenizer.encode("axyza", add_special=False) == [3, 2, 3]
    assert tokenizer.encode("</s>a", add_special=False) == [1, 3]
    assert tokenizer.encode("</s>", add_special=False, parse_special=False) == [2]
