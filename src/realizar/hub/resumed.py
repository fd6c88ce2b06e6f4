"""`ResumedFile`: a file of a hub, by several connections; one that was cut off goes on from where it was."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from realizar.errors import HubError
from realizar.hub.endpoint import NoRangesError, http_error, is_transport, open_range

_UNIT = 256 << 10
"""Bytes whose presence is kept: a cut costs each connection one of them at most."""
_LONGEST_RUN = 256
"""Units of one request."""
_CONNECTIONS = 8
_TRIES = 5
"""Requests in a row that may bring nothing, each after twice the wait of the one before."""
_FIRST_WAIT_S = 0.5
_POLL_S = 0.05


def count_kept(target: Path, size_bytes: int) -> int:
    """Bytes of a file that a cut download left beside its place."""
    return _kept_bytes(_read_kept(target, size_bytes) or bytearray(), size_bytes)


class ResumedFile:
    """A file of a hub that is to lie at `target`, with the SHA-256 `digest`.

    Beside it, until it is whole, lie `.partial`, of its full size with holes, and `.kept`, a byte for each of its
    units: 1 once the unit is written.
    """

    def __init__(self, url: str, target: Path, size_bytes: int, digest: str) -> None:
        self._url, self._target, self._size, self._digest = url, target, size_bytes, digest
        self._lock = threading.Lock()
        kept = _read_kept(target, size_bytes)
        self._is_new, self._kept = kept is None, kept or bytearray(-(-size_bytes // _UNIT))
        self._done_bytes = _kept_bytes(self._kept, size_bytes)
        self._next = 0
        self._ends = threading.Event()
        self._error: Exception | None = None

    def fetch(self, report: Callable[[int], None]) -> None:
        """Fetch what is missing and put the file in its place; `report` is called with the bytes so far.

        NoRangesError: the server gives whole files only, and nothing was fetched. HubError: the bytes are not those of
        the digest, and are discarded. Other errors are the library's or the disk's; what was fetched is kept.
        """
        partial, kept = _partial(self._target), _kept(self._target)
        report(self._done_bytes)
        self._target.parent.mkdir(parents=True, exist_ok=True)
        if self._is_new:
            kept.write_bytes(self._kept)
        with partial.open("r+b" if partial.exists() else "w+b") as data, kept.open("r+b") as marks:
            data.truncate(self._size)
            for _ in range(_CONNECTIONS):
                files = os.dup(data.fileno()), os.dup(marks.fileno())
                threading.Thread(target=self._work, args=files, daemon=True).start()
            try:
                found = self._hash_as_it_comes(partial, report)
            except NoRangesError:
                self._discard()
                raise
            finally:
                self._ends.set()  # who interrupts this one does not wait for answers of the hub
        if found != self._digest:
            self._discard()
            raise HubError(
                f"{self._target.name} has SHA-256 {found} instead of {self._digest}; the download was discarded"
            )
        partial.replace(self._target)
        kept.unlink()

    def _discard(self) -> None:
        _partial(self._target).unlink()
        _kept(self._target).unlink()

    def _hash_as_it_comes(self, partial: Path, report: Callable[[int], None]) -> str:
        """The digest of the file, which is read in order as far as it is there."""
        digest, unit, count = hashlib.sha256(), 0, len(self._kept)
        with partial.open("rb") as stream:
            while unit < count:
                report(self._done_bytes)
                if self._kept[unit]:
                    digest.update(stream.read(_UNIT))
                    unit += 1
                elif self._error is not None:
                    raise self._error
                else:
                    time.sleep(_POLL_S)
        report(self._size)
        return digest.hexdigest()

    def _work(self, data: int, marks: int) -> None:
        try:
            while (run := self._take_run()) is not None and not self._ends.is_set():
                self._fetch_run(*run, data, marks)
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            with self._lock:
                self._error = self._error or error
            self._ends.set()
        finally:
            os.close(data)
            os.close(marks)

    def _take_run(self) -> tuple[int, int] | None:
        """The next units that are missing, as a first one and one behind the last."""
        with self._lock:
            count = len(self._kept)
            while self._next < count and self._kept[self._next]:
                self._next += 1
            first = self._next
            longest = min(_LONGEST_RUN, -(-count // _CONNECTIONS))
            while self._next < min(first + longest, count) and not self._kept[self._next]:
                self._next += 1
            return (first, self._next) if self._next > first else None

    def _fetch_run(self, first: int, stop: int, data: int, marks: int) -> None:
        position, end, tries = first * _UNIT, min(stop * _UNIT, self._size), _TRIES
        while position < end and not self._ends.is_set():
            before = position
            try:
                with open_range(self._url, position, end) as (size, chunks):
                    if size != self._size:
                        raise HubError(f"{self._url} has {size} bytes instead of {self._size}")
                    for chunk in chunks:
                        if self._ends.is_set():
                            return
                        self._write(data, marks, position, chunk[: end - position])
                        position = min(position + len(chunk), end)
            except http_error() as error:
                if not is_transport(error) or (tries == 1 and position == before):
                    raise
            tries = _TRIES if position > before else tries - 1
            if tries == 0:
                raise HubError(f"{self._url}: the server sends nothing")
            if tries < _TRIES:
                self._ends.wait(_FIRST_WAIT_S * 2 ** (_TRIES - 1 - tries))

    def _write(self, data: int, marks: int, position: int, chunk: bytes) -> None:
        """Write bytes, and then note the units that they complete."""
        written = 0
        while written < len(chunk):
            written += os.pwrite(data, chunk[written:], position + written)
        stop = position + len(chunk)
        last = len(self._kept) if stop == self._size else stop // _UNIT
        for unit in range(position // _UNIT, last):
            os.pwrite(marks, b"\1", unit)
            self._kept[unit] = 1
        with self._lock:
            self._done_bytes += len(chunk)


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _kept_bytes(kept: bytearray, size_bytes: int) -> int:
    """The last unit may be short."""
    short = -size_bytes % _UNIT if kept and kept[-1] else 0
    return _UNIT * kept.count(1) - short


def _read_kept(target: Path, size_bytes: int) -> bytearray | None:
    """The marks of a cut download; None where there is none of this size."""
    try:
        found = bytearray(_kept(target).read_bytes())
        is_same = len(found) == -(-size_bytes // _UNIT) and _partial(target).stat().st_size == size_bytes
    except OSError:
        return None
    return found if is_same else None


def _partial(target: Path) -> Path:
    return target.with_name(f"{target.name}.partial")


def _kept(target: Path) -> Path:
    return target.with_name(f"{target.name}.kept")
