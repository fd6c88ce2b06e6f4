"""The keys that the prefix cache gains and loses, for a router of several engines. Standard library only.

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


def changes_of(blocks: KeyLog, ends: KeyLog | None) -> CacheChanges | None:
    """The changes of a cache since the last call; None where nothing changed.

    `blocks` can be found; a sequence can go on after the keys of `ends`, or after any block where that is None.
    """
    if not (blocks or ends):
        return None
    complete = blocks.is_complete
    added, removed = blocks.take()
    ends_added, ends_removed = (None, b"") if ends is None else ends.take()
    return CacheChanges(added, removed, ends_added, ends_removed, complete)
