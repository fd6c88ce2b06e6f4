"""Text that grows token by token, against all of it at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.engine.frontend.growing_choice import GrowingChoice
from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.tokenizer.detokenizer import Detokenizer
from realizar.tokenizer.stop_checker import StopChecker
from realizar.tokenizer.tokenizer import TokenBytes, Tokenizer


class ByteTokens(Tokenizer):
    """Ids 0-255 are bytes; 256 is a control token; from 257 on, given texts."""

    special_ids = frozenset({256})

    def __init__(self, texts: tuple[str, ...] = ()) -> None:
        self.texts = texts
        self.vocab_size = 257 + len(texts)
        self.special_texts: dict[str, str] = {}

    def token_bytes(self, index: int) -> bytes:
        return bytes([index]) if index < 256 else b"<end>" if index == 256 else self.texts[index - 257].encode()

    def token_text(self, index: int) -> str:
        return repr(self.token_bytes(index))

    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        return list(text.encode())


def grown(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer, skip_special=skip_special))
    return [*(detokenizer.add((index,)) for index in ids), detokenizer.finish()]


@given(st.lists(st.integers(0, 256), max_size=40), st.booleans())
def test_any_bytes(ids: list[int], skip_special: bool) -> None:
    tokenizer = ByteTokens()
    assert "".join(grown(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


@given(st.text(max_size=30))
def test_characters_are_never_split(text: str) -> None:
    pieces = grown(ByteTokens(), list(text.encode()))
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 32063), max_size=30))
def test_real_vocabulary(tokenizer_of: Callable[[str], Tokenizer], ids: list[int]) -> None:
    tokenizer = tokenizer_of("phi-3")
    assert "".join(grown(tokenizer, ids)) == tokenizer.decode(ids)


def checked(tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams) -> tuple[str, StopChecker]:
    checker = StopChecker(tokenizer, sampling, eos_ids=(256,))
    text = ""
    for index in ids:
        text += checker.add((index,))
        if checker.finish_reason is not None:
            return text, checker
    return text + checker.finish(), checker


def first_complete(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, character by character."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


TEXTS = ("a", "b", "ab", "ba", "aab", "é", "bé")


@given(
    st.lists(st.integers(0, len(TEXTS) - 1), max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3, unique=True).map(tuple),
)
def test_stop_strings_in_any_cut(choices: list[int], stops: tuple[str, ...]) -> None:
    tokenizer = ByteTokens(TEXTS)
    expected, stop = first_complete("".join(TEXTS[choice] for choice in choices), stops)
    text, checker = checked(tokenizer, [257 + choice for choice in choices], SamplingParams(stop=stops))
    assert (text, checker.stop_string) == (expected, stop)
    assert checker.finish_reason == ("stop" if stop is not None else None)
    single = checked(tokenizer, list("".join(TEXTS[choice] for choice in choices).encode()), SamplingParams(stop=stops))
    assert single[0] == expected


def test_a_possible_start_is_held_back() -> None:
    checker = StopChecker(ByteTokens(), SamplingParams(stop=("\n\nUser",)))
    given = [checker.add((byte,)) for byte in b"a\n\nUs"]
    assert given == ["a", "", "", "", ""]
    assert checker.add((ord("x"),)) == "\n\nUsx"
    assert checker.finish() == ""


@pytest.mark.parametrize(
    ("sampling", "text", "token"),
    [
        (SamplingParams(), "ab", 256),
        (SamplingParams(ignore_eos=True), "abcd", None),
        (SamplingParams(stop_token_ids=(ord("b"),)), "a", ord("b")),
        (SamplingParams(stop_token_ids=(ord("b"),), min_tokens=2), "ab", 256),
        (SamplingParams(min_tokens=3), "abcd", None),
        (SamplingParams(stop=("ab",), min_tokens=1), "ab", 256),
        (SamplingParams(stop=("b",), min_tokens=1), "a", None),
    ],
)
def test_stop_tokens(sampling: SamplingParams, text: str, token: int | None) -> None:
    found, checker = checked(ByteTokens(), [ord("a"), ord("b"), 256, ord("c"), ord("d")], sampling)
    assert (found, checker.stop_token_id) == (text, token)
    assert checker.add((ord("z"),)) == "" or checker.finish_reason is None


def test_held_text_comes_out_at_a_stop_token() -> None:
    checker = StopChecker(ByteTokens(), SamplingParams(stop=("abc",)), eos_ids=(256,))
    assert checker.add((ord("a"),)) + checker.add((ord("b"),)) == ""
    assert checker.add((256,)) == "ab"
    assert checker.finish() == ""


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_stop_token_that_ends_a_grammar_before_min_tokens_has_no_text(stop: tuple[str, ...]) -> None:
    """Under a grammar the engine ends a choice at its first stop token, so no text follows from `min_tokens`."""
    sampling = SamplingParams(
        stop=stop, stop_token_ids=(ord("}"),), min_tokens=5, structured=StructuredOutput("regex", "[{][}]")
    )
    choice = GrowingChoice("a", 0, StopChecker(ByteTokens(), sampling), pytest.fail, None)
    for byte in b"{}":
        if choice.may_stop:
            assert not choice.stops_at(byte)
        else:
            choice.token_ids.append(byte)
    assert choice.end("stop", ord("}"))
    completion = choice.completion(with_logprobs=False)
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("{", tuple(b"{}"), ord("}"))
