"""Special tokens of a vocabulary, its end-of-generation tokens, and the search for them in text. numpy only.

The lists of texts and the corrections of types are llama.cpp's, which uses them to repair files with incomplete
metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.tokenizer.marks import HARMONY_MARKS
from realizar.tokenizer.tokenizer import FillInIds
from realizar.tokenizer.vocabulary import TokenType, Vocabulary

END_OF_GENERATION = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)


def _spellings(word: str, *others: str) -> tuple[str, ...]:
    return f"<|fim_{word}|>", f"<fim-{word}>", f"<fim_{word}>", *others


_FILL_IN_MIDDLE: Mapping[str, tuple[str, ...]] = {
    "fim_prefix": _spellings("prefix", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    "fim_suffix": _spellings("suffix", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    "fim_middle": _spellings("middle", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    "fim_pad": _spellings("pad", "<PAD>", "[PAD]"),
    "fim_repo": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_separator": ("<|file_sep|>",),
}
_FILL_IN_ROLES = ("fim_prefix", "fim_suffix", "fim_middle")
# gpt-oss writes its channels with these tokens, so they are text of the answer.
_TEXT_MARKS = HARMONY_MARKS - {"<|end|>"}
# Models with one of these pairs end a channel with <|end|>, and not the answer.
_CHANNEL_MODELS = tuple({end, call} for end in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>"))
# Ends that some models use within an answer, and the type that their tokens then have.
_WITHIN_ANSWERS: Mapping[str, TokenType] = {"<|end|>": TokenType.USER_DEFINED, "</s>": TokenType.NORMAL}
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "separator": 102, "padding": 0, "mask": 103},
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
}

_ASCII_SPACE = " \t\n\v\f\r"
_SPACE_RUN = re.compile(f"[{_ASCII_SPACE}]*")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of a vocabulary.

    Attributes:
        types: int32 [tokens], of `TokenType`, corrected.
        ids: role (`bos`, `eos`, ...) to id, including defaults of the kind of model.
        end_of_generation: ids that end an answer.
    """

    types: NDArray[np.int32]
    ids: Mapping[str, int]
    end_of_generation: frozenset[int]

    @property
    def fill_in(self) -> FillInIds | None:
        """The marks of a text with a hole; None if the vocabulary lacks one of them."""
        return _fill_in(self.ids.get)


def find_special_tokens(vocabulary: Vocabulary) -> SpecialTokens:
    """Find roles and end-of-generation ids in the metadata or, if it lacks them, by the texts of tokens."""
    known = vocabulary.ids
    types = vocabulary.types.copy()
    ids = {role: index for role, index in _DEFAULT_IDS.get(vocabulary.model, {}).items() if index < len(types)}
    ids.update(vocabulary.special)
    for role in _FILL_IN_MIDDLE:
        found = _by_text(role, known.get)
        if role not in ids and found is not None:
            ids[role] = found
            types[found] = TokenType.CONTROL
    by_text = [known[text] for text in END_OF_GENERATION if text in known]
    types[by_text] = TokenType.CONTROL
    types[[known[text] for text in _TEXT_MARKS if text in known]] = TokenType.USER_DEFINED
    roles = ("fim_pad", "fim_repo", "fim_separator", "eos", "eot", "eom")
    ends = {*by_text, *(ids[role] for role in roles if role in ids)}
    found_texts = {text for text in END_OF_GENERATION if known.get(text) in ends}
    for text, kind in _WITHIN_ANSWERS.items():
        if text in found_texts - end_texts(found_texts):
            ends.discard(known[text])
            types[known[text]] = kind
    return SpecialTokens(types, ids, frozenset(ends))


def fill_in_ids(find: Callable[[str], int | None]) -> FillInIds | None:
    """The marks of a text with a hole by their texts, where a vocabulary does not name them; None if one is missing."""
    return _fill_in(lambda role: _by_text(role, find))


def _by_text(role: str, find: Callable[[str], int | None]) -> int | None:
    return next((index for text in _FILL_IN_MIDDLE[role] if (index := find(text)) is not None), None)


def _fill_in(find: Callable[[str], int | None]) -> FillInIds | None:
    ids = [index for role in _FILL_IN_ROLES if (index := find(role)) is not None]
    return FillInIds(*ids) if len(ids) == len(_FILL_IN_ROLES) else None


def end_texts(texts: Collection[str]) -> frozenset[str]:
    """Those texts of special tokens that end an answer; not those that a model with such tokens uses within one."""
    ends = {text for text in END_OF_GENERATION if text in texts}
    if any(group <= ends for group in _CHANNEL_MODELS):
        ends.discard("<|end|>")
    if "<|tool_response>" in ends:
        ends.discard("</s>")
    return frozenset(ends)


class SpecialTokenFinder:
    """Cuts text into special tokens and the pieces of text between them.

    A longer token wins over a shorter one that it overlaps, wherever they start; otherwise the first one wins.

    Args:
        tokens: text to id.
        strip_left, strip_right: ids that remove the white space before or after them.
    """

    def __init__(
        self,
        tokens: Mapping[str, int],
        strip_left: frozenset[int] = frozenset(),
        strip_right: frozenset[int] = frozenset(),
    ) -> None:
        self._tokens = tokens
        self._strip_left, self._strip_right = strip_left, strip_right
        lengths: dict[str, set[int]] = {}
        for text in filter(None, tokens):
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._firsts = re.compile("[" + re.escape("".join(lengths)) + "]") if lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of text and ids, in order, without empty pieces."""
        end = 0
        for start, stop, token in self._matches(text):
            if start < end:
                continue
            piece = text[end:start]
            if token in self._strip_left:
                piece = piece.rstrip(_ASCII_SPACE)
            if piece:
                yield piece
            yield token
            end = stop
            if token in self._strip_right:
                spaces = _SPACE_RUN.match(text, end)
                end = spaces.end() if spaces else end
        if end < len(text):
            yield text[end:]

    def _matches(self, text: str) -> Iterator[tuple[int, int, int]]:
        position = 0
        while found := self._next(text, position, len(text), 0):
            start, size = found
            # A longer token that starts inside this one replaces it, and so on along the chain.
            while longer := self._next(text, start + 1, start + size, size):
                start, size = longer
            if start > found[0]:
                for before, end, token in self._matches(text[position:start]):
                    yield position + before, position + end, token
            yield start, start + size, self._tokens[text[start : start + size]]
            position = start + size

    def _next(self, text: str, position: int, end: int, above: int) -> tuple[int, int] | None:
        """The first place in [position, end) where a token of more than `above` characters starts, and its length."""
        if self._firsts is None:
            return None
        for candidate in self._firsts.finditer(text, position, end):
            start = candidate.start()
            for size in self._lengths[candidate.group()]:
                if size <= above:
                    break
                if start + size <= len(text) and text[start : start + size] in self._tokens:
                    return start, size
        return None
