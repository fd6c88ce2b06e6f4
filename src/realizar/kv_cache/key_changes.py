"""`KeyWatch` notes which keys the prefix cache gains and loses, for a router of several engines. Standard library only.

A key is reported by its first 16 bytes, enough for a choice; what is found in a cache is decided by whole keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

KEY_BYTES = 16
"""Bytes of a reported key."""


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
    """The last change of each key since `take`, beginning with all keys that are there.

    `is_complete`: it has all of them, and earlier changes count no more.
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._changes = {key[:KEY_BYTES]: True for key in keys}
        self.is_complete = True

    def __bool__(self) -> bool:
        return bool(self._changes) or self.is_complete

    def add(self, key: bytes) -> None:
        self._changes[key[:KEY_BYTES]] = True

    def drop(self, key: bytes) -> None:
        self._changes[key[:KEY_BYTES]] = False

    def clear(self) -> None:
        self._changes.clear()
        self.is_complete = True

    def take(self) -> tuple[bytes, bytes]:
        """The keys that were added and those that were dropped, joined; they are forgotten here."""
        changes, self._changes, self.is_complete = self._changes, {}, False
        added = b"".join([key for key, is_there in changes.items() if is_there])
        return added, b"".join([key for key, is_there in changes.items() if not is_there])


class KeyWatch:
    """The logs of one cache.

    `blocks` can be found; a sequence can go on after the keys of `ends`, or after any block where that is None.
    """

    def __init__(self, blocks: Iterable[bytes], ends: Iterable[bytes] | None) -> None:
        self.blocks, self.ends = KeyLog(blocks), None if ends is None else KeyLog(ends)

    def take(self) -> CacheChanges | None:
        """The changes since the last call, at first all keys; None where nothing changed."""
        if not (self.blocks or self.ends):
            return None
        complete = self.blocks.is_complete
        added, removed = self.blocks.take()
        ends_added, ends_removed = (None, b"") if self.ends is None else self.ends.take()
        return CacheChanges(added, removed, ends_added, ends_removed, complete)
