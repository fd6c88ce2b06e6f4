"""`Tokenizer`: text to token ids and back, the same for every kind of vocabulary."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from realizar.errors import InvalidRequestError
from realizar.tokenizer.marks import MARKS

_LONGEST_UNKNOWN = 128


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: number of ids.
        bos_id, eos_id: begin and end of a text, where the model has them.
        eos_ids: every id after which an answer is over.
        add_bos, add_eos: whether `encode` with `add_special` adds them.
        chat_templates: template text by name; `default` is the one for plain chat.
        special_texts: `bos_token`, `eos_token`, ... as chat templates know them.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    chat_templates: Mapping[str, str]
    special_texts: Mapping[str, str]

    @property
    def chat_template(self) -> str | None:
        """The text of the model's template for plain chat."""
        return self.chat_templates.get("default")

    @functools.cached_property
    def mark_ids(self) -> Mapping[str, int]:
        """Control tokens that mark tool calls or reasoning in an answer, by text: the answer's text holds them."""
        found = {text: self._encode(text, False, True) for text in sorted(MARKS & self.control_texts())}
        return {text: ids[0] for text, ids in found.items() if len(ids) == 1}

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of text that one token may stand for, at most; unknown words included."""
        return max(_LONGEST_UNKNOWN, max((len(self.token_text(index)) for index in range(self.vocab_size)), default=0))

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special: whether BOS, EOS and the like are added as the model wants them.
            parse_special: whether control tokens spelled in the text become those tokens; otherwise they are text.

        Raises:
            InvalidRequestError: the text holds a lone surrogate, which UTF-8 can't express.
        """
        _check_encodable(text)
        return self._encode(text, add_special, parse_special)

    def decode(self, ids: Iterable[int], skip_special: bool = True, remove_space_prefix: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            skip_special: whether control tokens are left out.
            remove_space_prefix: whether the space is taken off that `encode` put before the text; only at the start
                of a text, not of an answer.

        Raises:
            InvalidRequestError: an id outside the vocabulary.
        """
        pieces = [self.token_bytes(index) for index in ids if not (skip_special and self.is_special(index))]
        data = b"".join(pieces)
        if remove_space_prefix and self.adds_space_prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def check_id(self, index: int) -> int:
        """The id itself.

        Raises:
            InvalidRequestError: it is outside the vocabulary.
        """
        if not 0 <= index < self.vocab_size:
            raise InvalidRequestError(f"token id {index} is outside the vocabulary of {self.vocab_size}")
        return index

    @property
    @abstractmethod
    def adds_space_prefix(self) -> bool:
        """Whether `encode` puts a space before a text."""

    @abstractmethod
    def token_bytes(self, index: int) -> bytes:
        """What a token adds to the text; control tokens give their name."""

    def vocabulary_bytes(self) -> list[bytes]:
        """`token_bytes` of every id."""
        return [self.token_bytes(index) for index in range(self.vocab_size)]

    def special_ids(self) -> frozenset[int]:
        """Every id for which `is_special` holds."""
        return frozenset(index for index in range(self.vocab_size) if self.is_special(index))

    @abstractmethod
    def token_text(self, index: int) -> str:
        """A token as the vocabulary spells it."""

    @abstractmethod
    def is_special(self, index: int) -> bool:
        """Whether a token is for control and no text."""

    @abstractmethod
    def control_texts(self) -> frozenset[str]:
        """Texts that `encode` turns into control tokens only when asked to."""

    @abstractmethod
    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        """`encode` of a text without surrogates.

        Args:
            restore: for `str.translate` of the pieces between special tokens: takes out the characters that keep
                control tokens apart which must stay text.
        """

    def encode_rendered(self, text: str, restore: Mapping[int, str] | None = None) -> list[int]:
        """Token ids of a rendered chat prompt: control tokens parsed, and exactly one BOS where the model wants one.

        Args:
            text: what a template gave.
            restore: what takes out the characters that `chat_template` put into users' texts, if it had to.

        Raises:
            InvalidRequestError: the text holds a lone surrogate, which UTF-8 can't express.
        """
        _check_encodable(text)
        bos = self.special_texts.get("bos_token", "")
        add_bos = self.add_bos and not (bos and text.startswith(bos))
        ids = self._encode(text, False, True, restore)
        return [self.bos_id, *ids] if add_bos and self.bos_id is not None else ids


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the text holds a lone surrogate at character {error.start}") from None
