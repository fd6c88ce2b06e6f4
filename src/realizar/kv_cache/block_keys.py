"""Names for the contents of full blocks, and which of them a cache gains and loses. numpy only.

A block's KV depends on its tokens, on all tokens before them, and on whatever else the request brings. Its key is
SHA-256 over the key of the block before, its own token ids, and offset and digest of each embedding that the request
brings for one of them; the first block follows a key of the salt. No two histories with one key can be made, so that a
hit never shows one client the contents of another's block.

A key is reported to a router of several engines by its first 16 bytes, enough for a choice; what is found in a cache is
decided by whole keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.request import DIGEST_BYTES, PromptEmbeddings

KEY_BYTES = 16
"""Bytes of a reported key."""


class BlockKeys:
    """Keys of the full blocks of one growing history."""

    def __init__(self, block_size: int, salt: str | None, embeddings: Sequence[PromptEmbeddings] = ()) -> None:
        self._block_size, self._embeddings = block_size, embeddings
        root = b"" if salt is None else b"salt " + salt.encode("utf-8", "surrogatepass")
        self._root = hashlib.sha256(root).digest()
        self._keys: list[bytes] = []

    def of(self, token_ids: NDArray[np.int32]) -> Sequence[bytes]:
        """Keys of full blocks, 32 bytes each, not to be changed; `token_ids` begin with those of earlier calls."""
        size = self._block_size
        while (len(self._keys) + 1) * size <= len(token_ids):
            start = len(self._keys) * size
            parent = self._keys[-1] if self._keys else self._root
            given = b"".join([_given(run, start, start + size) for run in self._embeddings])
            self._keys.append(hashlib.sha256(parent + token_ids[start : start + size].tobytes() + given).digest())
        return self._keys


def _given(run: PromptEmbeddings, start: int, end: int) -> bytes:
    at = range(max(run.start, start), min(run.end, end))
    offsets = [(token - start, (token - run.start) * DIGEST_BYTES) for token in at]
    return b"".join(
        [offset.to_bytes(4, "little") + run.digests[first : first + DIGEST_BYTES] for offset, first in offsets]
    )


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Changes of a prefix cache since the last ones were taken. Columns are keys of `KEY_BYTES` bytes, joined.

    Attributes:
        added, removed: blocks that can be found, and can't any more.
        ends_added, ends_removed: keys after which a sequence can go on; `ends_added` is None where it can after any
            block that can be found.
        complete: the columns have all that can be found, and earlier changes count no more.
    """

    added: bytes = b""
    removed: bytes = b""
    ends_added: bytes | None = None
    ends_removed: bytes = b""
    complete: bool = False


class KeyLog:
    """The last change of each key since `take`; before `begin` nothing is noted."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] | None = None
        self.is_complete = False  # it has all keys that are there, and earlier changes count no more

    def __bool__(self) -> bool:
        return bool(self._changes) or self.is_complete

    def begin(self, keys: Iterable[bytes]) -> None:
        """Note changes from now on, first of all the keys that are there; what was noted before is dropped."""
        self._changes, self.is_complete = {key[:KEY_BYTES]: True for key in keys}, True

    def note(self, key: bytes, *, is_there: bool) -> None:
        if self._changes is not None:
            self._changes[key[:KEY_BYTES]] = is_there

    def clear(self) -> None:
        """No key is there any more."""
        if self._changes is not None:
            self.begin(())

    def take(self) -> tuple[bytes, bytes]:
        """The keys that were added and those that were dropped, joined; they are forgotten here."""
        changes, self._changes, self.is_complete = self._changes or {}, {}, False
        added = b"".join([key for key, is_there in changes.items() if is_there])
        return added, b"".join([key for key, is_there in changes.items() if not is_there])
