"""`Cursor`: bounds-checked primitive reads from the header of a GGUF file. numpy."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.mapped_file import CutShortError, MappedFile
from realizar.errors import CheckpointError

MAX_HEADER_BYTES = 64 << 20
"""Metadata and tensor table together. The largest vocabularies known take 16 MB; sparse files can claim anything."""

MAX_ITEMS = 1 << 21
"""Strings and inner arrays in all metadata together: bounds the time that a header takes."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A place in a GGUF header. Every length is checked against the bytes left before anything is allocated.

    Attributes:
        position: absolute offset of the next byte.
        place: the item that is being read, for messages, such as `key 'general.name'`; set by the caller.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.position = 0
        self.place = ""
        self._end = min(file.size, MAX_HEADER_BYTES)
        self._items_left = MAX_ITEMS

    @property
    def bytes_left(self) -> int:
        """Bytes of the file (or of the largest header allowed) after `position`."""
        return self._end - self.position

    def error(self, offset: int, reason: str) -> CheckpointError:
        where = f"{self.place}, offset {offset}" if self.place else f"offset {offset}"
        return CheckpointError(self.file.path, where, reason)

    def skip(self, size: int, what: str) -> int:
        start = self.position
        if size > self.bytes_left:
            raise self._beyond(start, f"{what} of {size} bytes")
        self.position = start + size
        return start

    def unpack(self, layout: struct.Struct, what: str) -> tuple[int | float | bool, ...]:
        """`what` names the numbers in the error if the file ends before them."""
        return layout.unpack_from(self.file.buffer, self.skip(layout.size, what))

    def u32(self, what: str) -> int:
        return int(self.unpack(_U32, what)[0])

    def u64(self, what: str) -> int:
        return int(self.unpack(_U64, what)[0])

    def count(self, what: str, smallest: int) -> int:
        """A u64 count of things that take at least `smallest` bytes each."""
        offset = self.position
        count = self.u64(f"number of {what}")
        if count > self.bytes_left // smallest:
            raise self._beyond(offset, f"{count} {what}")
        return count

    def string(self, what: str) -> str:
        """Read a string with its length. Raises `CheckpointError` if it is not UTF-8."""
        offset = self.position
        size = self.u64(f"length of {what}")
        if size > self.bytes_left:
            raise self._beyond(offset, f"{what} of {size} bytes")
        start = self.skip(size, what)
        try:
            return str(self.file.buffer[start : self.position], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(start + error.start, f"{what} is not valid UTF-8") from error

    def strings(self, count: int) -> list[str]:
        """The code of `string` is inlined, because vocabularies hold hundreds of thousands."""
        self.spend(count)
        buffer, read_size, end, position = self.file.buffer, _U64.unpack_from, self._end, self.position
        values: list[str] = []
        append = values.append
        try:
            for _ in range(count):
                start = position + 8
                if start > end:
                    raise self._beyond(position, f"string {len(values)} of the array")
                stop = start + read_size(buffer, position)[0]
                if stop > end:
                    raise self._beyond(position, f"string {len(values)} of the array, of {stop - start} bytes")
                append(str(buffer[start:stop], "utf-8"))
                position = stop
        except UnicodeDecodeError as error:
            raise self.error(position + 8, f"string {len(values)} of the array is not valid UTF-8") from error
        self.position = position
        return values

    def numbers(self, dtype: np.dtype[np.generic], count: int) -> NDArray[np.generic]:
        """[count] of a little-endian dtype, a copy that is aligned and read-only."""
        start = self.skip(count * dtype.itemsize, f"array of {count} {dtype.name}")
        return np.frombuffer(self.file.buffer[start : self.position], dtype=dtype)

    def spend(self, count: int) -> None:
        """Counts strings and inner arrays against `MAX_ITEMS`."""
        self._items_left -= count
        if self._items_left < 0:
            raise self.error(self.position, f"more than {MAX_ITEMS} strings and arrays in the metadata")

    def _beyond(self, offset: int, what: str) -> CheckpointError:
        if self._end < self.file.size:
            return self.error(offset, f"{what} would take the header over its limit of {MAX_HEADER_BYTES >> 20} MiB")
        found = self.error(offset, f"{what} would run past the end of the file ({self.bytes_left} bytes left)")
        return CutShortError(found.path, found.where, found.reason)
