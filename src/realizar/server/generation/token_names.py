"""`TokenNames`: tokens in answers, by name, as bytes, and as parts of JSON that are kept.

A token whose bytes are not valid UTF-8 is named `bytes:\\xe2\\x80`, so that different tokens have different names. A
request may ask for `token_id:N` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from realizar.tokenizer.tokenizer import Tokenizer

_MAX_KEPT = 1 << 15  # some 10 MB at most
_Part = TypeVar("_Part")


class TokenNames:
    """Names of a vocabulary's tokens.

    Args:
        as_ids: names are `token_id:N`.

    Attributes:
        json_names: by id, the name as JSON.
        json_before: by id, the beginning of an object that has the name as `token`, up to its `logprob`.
        json_bytes: by id, what follows there: the token's `bytes`.
        num_characters: by id, characters of the token's text; None where its bytes are not characters by themselves.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._data_of = tokenizer.spelled_bytes.__getitem__
        self._rows: dict[tuple[Callable[..., object], int], object] = {}
        self.json_names = _Kept(self._json_name)
        self.json_before = _Kept(lambda token_id: b'{"token":%b,"logprob":' % self.json_names[token_id])
        self.json_bytes = _Kept(lambda token_id: b',"bytes":' + msgspec.json.encode(list(self._data_of(token_id))))
        self.num_characters = _Kept(self._num_characters)

    def rows(self, make: Callable[[TokenNames, int], _Part], top_n: int) -> _Part:
        """What `make` made of these names for so many listed tokens: all requests that list as many share it."""
        found = self._rows.get((make, top_n))
        if found is None:
            found = self._rows[make, top_n] = make(self, top_n)
        return cast("_Part", found)

    def name(self, token_id: int) -> str:
        """A token's name."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._data_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def text_bytes(self, token_id: int, *, spelled: bool) -> bytes:
        """The bytes that a token adds to a text; with `spelled`, control tokens add their names."""
        hidden = not spelled and self._tokenizer.is_special(token_id)
        return b"" if hidden else self._data_of(token_id)

    def _json_name(self, token_id: int) -> bytes:
        return msgspec.json.encode(self.name(token_id))

    def _num_characters(self, token_id: int) -> int | None:
        try:
            return len(self.text_bytes(token_id, spelled=False).decode())
        except UnicodeDecodeError:
            return None


class _Kept(dict[int, _Part], Generic[_Part]):
    """What `make` made of ids, until there are too many."""

    def __init__(self, make: Callable[[int], _Part]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> _Part:
        if len(self) >= _MAX_KEPT:
            self.clear()
        made = self[token_id] = self._make(token_id)
        return made
