"""`Tokenizer` converts text to token ids and back, for every kind of vocabulary."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from realizar.errors import InvalidRequestError
from realizar.tokenizer.marks import HARMONY_MARKS, MARKS

_LONGEST_UNKNOWN = 128


class FillInIds(NamedTuple):
    """Control tokens of a text with a hole: before what precedes it, before what follows it, and at the hole."""

    prefix: int
    suffix: int
    middle: int


class Tokenizer(ABC):
    """Converts text to token ids and back.

    Attributes:
        bos_id, eos_id: ids of a text's begin and end, or None.
        eos_ids: every id that ends an answer.
        add_bos, add_eos: `encode` with `add_special` adds them.
        special_ids: ids of control tokens, which are not text.
        adds_space_prefix: `encode` puts a space before a text.
        chat_templates: template texts by name; `default` is for plain chat.
        special_texts: `bos_token`, `eos_token`, ... with the names of chat templates.
        fill_in: marks of a text with a hole, or None if the vocabulary has none.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    special_ids: frozenset[int]
    adds_space_prefix: bool
    chat_templates: Mapping[str, str]
    special_texts: Mapping[str, str]
    fill_in: FillInIds | None = None

    @functools.cached_property
    def mark_ids(self) -> Mapping[str, int]:
        """Control tokens that mark tool calls or reasoning, by text; an answer's text contains them."""
        return self._whole_ids(MARKS & self.control_texts()) | self._harmony_ids()

    @functools.cached_property
    def answer_marks(self) -> Mapping[str, int]:
        """The tokens that mark tool calls or reasoning, by text, whatever their type."""
        return self._whole_ids(MARKS) | self._harmony_ids()

    def _harmony_ids(self) -> dict[str, int]:
        """The marks of answers in channels, if the vocabulary has all of them as tokens, whatever their type."""
        found = self._whole_ids(HARMONY_MARKS)
        return found if len(found) == len(HARMONY_MARKS) else {}

    def _whole_ids(self, texts: Iterable[str]) -> dict[str, int]:
        """The texts that are one token each, and its id."""
        found = {text: self._encode(text, False, True) for text in sorted(texts)}
        return {text: ids[0] for text, ids in found.items() if len(ids) == 1 and self.token_text(ids[0]) == text}

    @functools.cached_property
    def answer_bytes(self) -> TokenBytes:
        """The bytes that a token adds to an answer's text: none for control tokens, but for marks."""
        return TokenBytes(self, shown=self.mark_ids.values())

    @functools.cached_property
    def spelled_bytes(self) -> TokenBytes:
        """`token_bytes` of every id that has been asked for."""
        return TokenBytes(self, skip_special=False)

    @functools.cached_property
    def longest_token(self) -> int:
        """The largest number of characters that one token may stand for, including unknown words."""
        return max(_LONGEST_UNKNOWN, max((len(self.token_text(index)) for index in range(self.vocab_size)), default=0))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` adds BOS, EOS and the like as the model wants them.

        Control tokens' texts become these tokens, or stay text without `parse_special`. Raises InvalidRequestError for
        a lone surrogate, which UTF-8 can't express.
        """
        _check_encodable(text)
        return self._encode(text, add_special, parse_special)

    def decode(self, ids: Iterable[int], skip_special: bool = True, remove_space_prefix: bool = False) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD.

        Args:
            skip_special: leave control tokens out.
            remove_space_prefix: remove the space that `encode` put before the text; for the start of a text, and not
                for an answer.

        Raises:
            InvalidRequestError: an id is outside the vocabulary.
        """
        data = b"".join(self.token_bytes(index) for index in ids if not (skip_special and self.is_special(index)))
        if remove_space_prefix and self.adds_space_prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def check_id(self, index: int) -> int:
        """The id; InvalidRequestError where it is outside the vocabulary."""
        if not 0 <= index < self.vocab_size:
            raise InvalidRequestError(f"token id {index} is outside the vocabulary of {self.vocab_size}")
        return index

    @abstractmethod
    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token adds to the text; control tokens give their names."""

    def vocabulary_bytes(self) -> list[bytes]:
        return [self.token_bytes(index) for index in range(self.vocab_size)]

    def is_special(self, index: int) -> bool:
        return self.check_id(index) in self.special_ids

    def control_texts(self) -> frozenset[str]:
        """The texts of control tokens, which `encode` parses only with `parse_special`."""
        return frozenset(map(self.token_text, self.special_ids))

    @abstractmethod
    def token_text(self, index: int) -> str:
        """A token's spelling in the vocabulary."""

    @abstractmethod
    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        """Encode a text without surrogates; `restore` as of `encode_rendered`, for the texts between special tokens."""

    def encode_rendered(self, text: str, restore: Mapping[int, str] | None = None) -> list[int]:
        """Token ids of a rendered chat prompt, with control tokens parsed, and exactly one BOS if the model wants one.

        `restore` is the table for `str.translate` that removes the marks that `chat_template` put into users' texts, or
        None. Raises InvalidRequestError for a lone surrogate, which UTF-8 can't express.
        """
        _check_encodable(text)
        bos = self.special_texts.get("bos_token", "")
        add_bos = self.add_bos and not (bos and text.startswith(bos))
        ids = self._encode(text, False, True, restore)
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids


class TokenBytes(dict[int, bytes]):
    """The bytes that each token adds to a text. A token is looked up in the vocabulary once, when it first comes.

    Control tokens have no bytes if `skip_special`, but those that are `shown`. A lookup raises InvalidRequestError for
    an id outside the vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, shown: Iterable[int] = ()) -> None:
        super().__init__()
        self._tokenizer, self._skip_special, self._shown = tokenizer, skip_special, frozenset(shown)

    def __missing__(self, token_id: int) -> bytes:
        hidden = self._skip_special and token_id not in self._shown and self._tokenizer.is_special(token_id)
        found = self[token_id] = b"" if hidden else self._tokenizer.token_bytes(token_id)
        return found


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text holds a lone surrogate at character {error.start}") from None
