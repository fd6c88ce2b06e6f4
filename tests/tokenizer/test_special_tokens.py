"""Special tokens of vocabularies are known and found in text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realizar.tokenizer.special_tokens import SpecialTokenFinder, find_special_tokens
from realizar.tokenizer.tokenizer import Tokenizer
from realizar.tokenizer.vocabulary import TokenType, Vocabulary


def found_one_by_one(text: str, tokens: dict[str, int]) -> list[str | int]:
    """The longest token first, everywhere; then the next in what is left."""
    pieces: list[str | int] = [text] if text else []
    for token in sorted(tokens, key=len, reverse=True):
        cut: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                cut.append(piece)
                continue
            for place, part in enumerate(piece.split(token)):
                cut += ([tokens[token]] if place else []) + ([part] if part else [])
        pieces = cut
    return pieces


def has_overlapping_equals(tokens: list[str]) -> bool:
    """True if two tokens of one length can overlap; then their order is not defined."""
    return any(
        one != other and len(one) == len(other) and any(one.endswith(other[:size]) for size in range(1, len(one)))
        for one in tokens
        for other in tokens
    )


@given(
    st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=5, unique=True), st.text("ab<>", max_size=30)
)
@example(["a", "<a", "a<<"], "<a")  # the text ends where a longer one might go on
def test_longer_tokens_win(texts: list[str], text: str) -> None:
    if has_overlapping_equals(texts):
        return
    tokens = {token: place for place, token in enumerate(texts)}
    assert list(SpecialTokenFinder(tokens).split(text)) == found_one_by_one(text, tokens)


def test_stripping() -> None:
    finder = SpecialTokenFinder({"<m>": 1, "<r>": 2}, strip_left=frozenset({1}), strip_right=frozenset({2}))
    assert list(finder.split("a \n<m> b <r> \n\tc<r>  <r>")) == ["a", 1, " b ", 2, "c", 2, 2]


def test_nothing_special() -> None:
    assert list(SpecialTokenFinder({}).split("abc")) == ["abc"]
    assert list(SpecialTokenFinder({"x": 1}).split("")) == []


def vocabulary(tokens: list[str], kinds: dict[str, TokenType] | None = None, **special: int) -> Vocabulary:
    types = [(kinds or {}).get(token, TokenType.CONTROL) for token in tokens]
    return Vocabulary(
        path=Path("made-up.gguf"),
        model="gpt2",
        pre="default",
        tokens=tokens,
        ids={token: index for index, token in enumerate(tokens)},
        types=np.array(types, np.int32),
        scores=np.zeros(len(tokens), np.float32),
        merges=(),
        special=special,
        flags={},
        charsmap=b"",
        name="",
        architecture="",
    )


@pytest.mark.parametrize(
    ("tokens", "special", "ends"),
    [
        (["a", "<|im_end|>", "<|endoftext|>"], {}, {"<|im_end|>", "<|endoftext|>"}),
        (["a", "b", "c"], {"eos": 1, "eot": 2}, {"b", "c"}),
        (["a", "<|eom_id|>", "<|eot_id|>", "x"], {"eos": 3}, {"<|eom_id|>", "<|eot_id|>", "x"}),
        (["<|return|>", "<|call|>", "<|end|>"], {}, {"<|return|>", "<|call|>"}),
        (["<|flush|>", "<|calls|>", "<|end|>"], {}, {"<|flush|>", "<|calls|>"}),
        (["<|end|>", "<|return|>"], {}, {"<|end|>", "<|return|>"}),
        (["<turn|>", "<|tool_response>", "</s>"], {}, {"<turn|>", "<|tool_response>"}),
        (["</s>", "<eos>"], {}, {"</s>", "<eos>"}),
        (["<fim_pad>", "<reponame>", "<|file_sep|>", "a"], {}, {"<fim_pad>", "<reponame>", "<|file_sep|>"}),
        (["<fim_pad>", "<|fim_pad|>"], {"fim_pad": 0}, {"<fim_pad>"}),
    ],
)
def test_end_of_generation(tokens: list[str], special: dict[str, int], ends: set[str]) -> None:
    found = find_special_tokens(vocabulary(tokens, **special))
    assert {tokens[index] for index in found.end_of_generation} == ends


def test_types_are_corrected() -> None:
    tokens = ["<|im_end|>", "<fim_prefix>", "<|channel|>", "plain", "<|return|>", "<|call|>", "<|end|>"]
    kinds = dict.fromkeys(tokens, TokenType.NORMAL) | {"<|channel|>": TokenType.CONTROL}
    types = find_special_tokens(vocabulary(tokens, kinds)).types.tolist()
    control, user, normal = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.NORMAL
    assert types == [control, control, user, normal, control, control, user]


def test_defaults_of_the_model_kind() -> None:
    tokens = ["<unk>", "<s>", "</s>"]
    llama = replace(vocabulary(tokens), model="llama")
    assert find_special_tokens(llama).ids == {"unknown": 0, "bos": 1, "eos": 2}
    assert "bos" not in find_special_tokens(vocabulary(tokens)).ids
    assert "bos" not in find_special_tokens(replace(llama, model="bert")).ids, "101 is beyond this vocabulary"


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("starcoder", ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")),
        ("deepseek-coder", ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
        ("llama-bpe", None),
        ("qwen2", None),
    ],
)
def test_marks_of_a_hole(
    tokenizer_of: Callable[[str], Tokenizer], name: str, texts: tuple[str, str, str] | None
) -> None:
    tokenizer = tokenizer_of(name)
    found = tokenizer.fill_in
    assert (None if found is None else tuple(map(tokenizer.token_text, found))) == texts
