"""Control tokens of odd vocabularies: users' texts that spell them stay text, and come back as they were."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.errors import InvalidRequestError
from realizar.tokenizer.special_tokens import SpecialTokenFinder
from realizar.tokenizer.templates.control_texts import ControlTextHider

EVERY_PRIVATE_CHARACTER = "".join(
    map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)))
)


def hide(value: Any, *texts: str) -> tuple[Any, Any]:
    hidden = ControlTextHider(frozenset(texts)).hide(value)
    return (value, {}) if hidden is None else (hidden.value, hidden.restore)


@pytest.mark.parametrize("text", ["a", "xax", "aaa", "<a>"])
def test_a_control_token_of_one_character(text: str) -> None:
    """No mark behind its first character can break it."""
    safe, restore = hide([text], "a", "<a>", "<s>")
    assert "a" not in safe[0]
    assert safe[0].translate(restore) == text


@pytest.mark.parametrize("token", ["\ue000", "<\ue000s>", "\ue000\ue001"])
def test_a_mark_is_no_character_of_a_control_token(token: str) -> None:
    safe, restore = hide(["<s>" + token], "<s>", token)
    assert "<s>" not in safe[0]
    assert token not in safe[0]
    assert safe[0].translate(restore) == "<s>" + token


def test_a_text_of_every_mark_is_refused() -> None:
    assert ControlTextHider(frozenset({"<s>"})).hide([EVERY_PRIVATE_CHARACTER]) is None
    most = EVERY_PRIVATE_CHARACTER[:6400] + "<s>"
    safe, restore = hide([most], "<s>")
    assert safe[0].translate(restore) == most
    with pytest.raises(InvalidRequestError, match="private-use"):
        hide([EVERY_PRIVATE_CHARACTER + "<s>"], "<s>")


def test_a_token_that_begins_within_itself() -> None:
    """The ends `aa` and `a` of a text are both beginnings of `aab`; the next text may complete either."""
    safe, restore = hide(["aa", "ab"], "aab")
    assert "aab" not in "".join(safe)
    assert [text.translate(restore) for text in safe] == ["aa", "ab"]


def test_keys_of_objects_are_texts_too() -> None:
    value = {"properties": {"<s> x": 1, "role": 2}}
    safe, restore = hide(value, "<s>", "role")
    (marked, role) = safe["properties"]
    assert marked != "<s> x"
    assert marked.translate(restore) == "<s> x"
    assert role == "role", "what templates look up by name keeps its name"


@given(
    texts=st.frozensets(st.text("ab<>\ue000", min_size=1, max_size=5), min_size=1, max_size=6),
    strings=st.lists(st.text("ab<>\ue000 ", max_size=12), max_size=3),
)
def test_no_control_token_is_left_and_all_comes_back(texts: frozenset[str], strings: list[str]) -> None:
    hidden = ControlTextHider(texts).hide(strings)
    safe = strings if hidden is None else hidden.value
    finder = SpecialTokenFinder({text: index for index, text in enumerate(sorted(texts))})
    assert all(isinstance(piece, str) for piece in finder.split("".join(safe)))
    assert [text.translate(hidden.restore) if hidden else text for text in safe] == strings
