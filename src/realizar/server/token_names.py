"""`TokenNames`: tokens in answers, by name, as bytes, and as parts of JSON.

A token whose bytes are not valid UTF-8 is named `bytes:\\xe2\\x80`, so that different tokens have different names. A
request may ask for `token_id:N` instead.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar, cast

import msgspec

from realizar.tokenizer.tokenizer import Tokenizer

_Part = TypeVar("_Part")
_encode = msgspec.json.Encoder().encode


class TokenParts(NamedTuple):
    """Parts of JSON for every token of a vocabulary, lists by id.

    Lists, as a model that is unsure lists ids from all over the vocabulary: a dict of so many is slow to read, since
    its places, its keys and its values all lie far apart. They take some 130 bytes a token.

    Attributes:
        names: the name.
        data: the token's bytes, a list of numbers.
        num_characters: characters of the token's text; -1 where its bytes are not characters by themselves.
    """

    names: list[bytes]
    data: list[bytes]
    num_characters: list[int]


class TokenNames:
    """Names of a vocabulary's tokens; `as_ids` makes them `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._data_of = tokenizer.spelled_bytes.__getitem__
        self._rows: dict[tuple[Callable[..., object], int], object] = {}
        self._parts: TokenParts | None = None
        self._making = threading.Lock()

    @property
    def parts(self) -> TokenParts:
        """Of all tokens; made when they are first asked for, once, however many threads ask meanwhile.

        That takes 0.3 s for 128,256, which the event loop need not spend.
        """
        if self._parts is None:
            with self._making:
                if self._parts is None:
                    self._parts = self._made_parts()
        return self._parts

    def _made_parts(self) -> TokenParts:
        vocabulary = self._tokenizer.vocabulary_bytes()
        special_ids = self._tokenizer.special_ids
        names: list[bytes] = []
        num_characters: list[int] = []
        for token_id, data in enumerate(vocabulary):
            try:
                text = data.decode()
            except UnicodeDecodeError:
                text, count = _name_of_bytes(data), -1
            else:
                count = len(text)
            names.append(_encode(_name_of_id(token_id) if self._as_ids else text))
            num_characters.append(0 if token_id in special_ids else count)
        return TokenParts(names, [_encode(list(data)) for data in vocabulary], num_characters)

    def rows(self, make: Callable[[TokenNames, int], _Part], top_n: int) -> _Part:
        """The result of `make` for these names and so many listed tokens; all requests that list as many share it."""
        found = self._rows.get((make, top_n))
        if found is None:
            found = self._rows[make, top_n] = make(self, top_n)
        return cast("_Part", found)

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return _name_of_id(token_id)
        data = self._data_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return _name_of_bytes(data)

    def text_bytes(self, token_id: int, *, spelled: bool) -> bytes:
        """The bytes that a token adds to a text; with `spelled`, control tokens add their names."""
        hidden = not spelled and self._tokenizer.is_special(token_id)
        return b"" if hidden else self._data_of(token_id)


def parts_of(parts: list[_Part], token_ids: Sequence[int]) -> Sequence[_Part]:
    """The parts of some ids, in their order."""
    if len(token_ids) < 2:
        return [parts[token_id] for token_id in token_ids]
    return cast("Sequence[_Part]", operator.itemgetter(*token_ids)(parts))  # three times as fast as a loop


def _name_of_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _name_of_bytes(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
