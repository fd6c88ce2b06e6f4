"""`BlockFiles`: contents of KV blocks and snapshots in files, by the key of their history.

A file has the contents of one block of one cache group, or of one snapshot of a state, and a digest of them. It is
written under another name and then renamed, so that a process that is killed leaves a whole file or none. Whatever else
may have become of a file shows in its digest: it is then removed, and costs its own reuse.

Several processes may share a folder. Each bounds it when it has written enough since it looked last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from realizar.errors import InvalidRequestError
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_FOLDER = "realizar-blocks"
_NAME = re.compile(r"[0-9a-f]{64}\.\d+(\.\d+\.\d+)?")  # of a file; nothing else is ever removed
_DIGEST_BYTES = 32
_PAGE_BYTES = 4096
_SAMPLED_BYTES = 1 << 20
_SAMPLES = 256
_FREE_SHARE = 2  # of what a disk has free, one in so many parts is taken where no bound is configured
_MOST_BYTES = 64 << 30  # then
_SWEPT_SHARE = 0.9  # of the bound, which is left once it was reached
_CHECKED_SHARE = 16  # of the bound: after one in so many parts was written, the folder is looked at
_PAUSE_S = 60.0  # without writing, after a disk refused
_CLEARED = ".cleared-"  # in the name of a folder whose files are to be removed
_STALE_S = 3600.0  # after which a file that was never renamed is another process' that was killed


class BlockFiles:
    """The files of one model, below a folder that is its user's alone. Threads may share it.

    Args:
        folder: has a folder of the files of all models, which is made here.
        name: of this model and whatever else contents depend on.
        limit_bytes: of all files in the folder; None takes half of what the disk has free, at most 64 GiB.

    Attributes:
        generation: of what is found; each `clear` begins another.

    Raises InvalidRequestError where the folder can't be made or belongs to somebody else.
    """

    def __init__(self, folder: Path, name: str, limit_bytes: int | None = None) -> None:
        self._all = folder.expanduser().absolute() / _FOLDER
        self._own = self._all / name
        try:
            self._all.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(self._all)
            self._own.mkdir(mode=0o700, exist_ok=True)
            if limit_bytes is None:
                limit_bytes = min(shutil.disk_usage(self._own).free // _FREE_SHARE + self._taken(), _MOST_BYTES)
        except OSError as error:
            message = f"cache_dir {folder} can't be used: {error.strerror or error}"
            raise InvalidRequestError(message, "cache_dir") from error
        self.limit_bytes, self.generation = limit_bytes, 0
        self._lock = threading.Lock()
        self._written_bytes = 0  # since the folder was looked at
        self._refused_until_s = 0.0
        self._sweep()

    def __str__(self) -> str:
        return f"{self._all}, at most {format_bytes(self.limit_bytes)}"

    @property
    def takes_more(self) -> bool:
        """False for a while after the disk refused to write."""
        return time.monotonic() >= self._refused_until_s

    def has(self, key: bytes, part: int) -> bool:
        return os.access(self._path(key, part), os.R_OK)

    def write(self, key: bytes, part: int, contents: NDArray[np.uint8], generation: int | None = None) -> bool:
        """Keep contents, uint8 [bytes]; False where the disk refuses, which is logged, and of a generation that was
        cleared, also meanwhile. None is the present one.
        """
        generation, path = self.generation if generation is None else generation, self._path(key, part)
        written = Path(f"{path}.{os.getpid()}.{threading.get_ident()}")
        try:
            for folder in (self._own, written.parent):
                folder.mkdir(mode=0o700, exist_ok=True)
            with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(contents.data)
                file.write(_digest(key, part, contents))
            if generation != self.generation:
                _remove(written)
                return False
            written.replace(path)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._all.is_dir():
                return False  # its folder went, as this process or another cleared it
            _remove(written)
            self._refused_until_s = time.monotonic() + _PAUSE_S
            _LOG.warning("%s takes no blocks for %d s: %s", self._all, _PAUSE_S, error.strerror or error)
            return False
        with self._lock:
            self._written_bytes += contents.size
            is_much = self._written_bytes > self.limit_bytes // _CHECKED_SHARE
            if is_much:
                self._written_bytes = 0
        if is_much:
            self._sweep()
        return True

    def read(self, keys: Sequence[bytes], part: int, contents: NDArray[np.uint8]) -> list[bool]:
        """Read contents of just so many bytes into uint8 [keys, bytes].

        False where there are none, or they are not what was written: such a file is removed.
        """
        return [self._read(key, part, row) for key, row in zip(keys, contents, strict=True)]

    def _read(self, key: bytes, part: int, into: NDArray[np.uint8]) -> bool:
        path, digest = self._path(key, part), bytearray(_DIGEST_BYTES + 1)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.preadv(file, [into.data, digest], 0)
            finally:
                os.close(file)
        except FileNotFoundError:
            return False
        except OSError as error:
            _LOG.warning("%s can't be read: %s", path, error.strerror or error)
            return False
        if size == into.size + _DIGEST_BYTES and digest[:-1] == _digest(key, part, into):
            return True
        _LOG.warning("%s is damaged and is removed", path)
        _remove(Path(path))
        return False

    def used(self, keys: Iterable[bytes], part: int) -> None:
        """Note that some were of use now."""
        for key in keys:
            with suppress(OSError):  # another process removed it
                os.utime(self._path(key, part))

    def clear(self) -> None:
        """Let nothing be found that is there of this model, nor what is being written; `remove_cleared` removes it."""
        self.generation += 1
        try:
            self._own.rename(f"{self._own}{_CLEARED}{time.time_ns()}")
        except FileNotFoundError:
            return  # another process did
        except OSError as error:
            _LOG.warning("%s can't be cleared: %s", self._own, error.strerror or error)

    def remove_cleared(self) -> None:
        """Remove the files of all models that were cleared, by any process."""
        for cleared in self._all.glob(f"*{_CLEARED}*"):
            for path in _files(cleared):
                _remove(path)
            for folder in (*cleared.glob("*"), cleared):
                with suppress(OSError):  # another process removed it, or something else is in it
                    folder.rmdir()

    def _path(self, key: bytes, part: int) -> str:
        """No `Path`: thousands are looked for before a prompt is read, and making those took longer than asking."""
        name = key.hex()
        return f"{self._own}/{name[:2]}/{name}.{part}"

    def _taken(self) -> int:
        return sum(size for _, size, _ in _sizes(self._all))

    def _sweep(self) -> None:
        """Remove what a killed process left, and beyond the bound the files that were not read for the longest time."""
        self.remove_cleared()
        now_s, kept = time.time(), []
        for path, size, used_s in _sizes(self._all):
            if path.name.count(".") > 1 and now_s - used_s > _STALE_S:
                _remove(path)
            else:
                kept.append((used_s, size, path))
        taken = sum(size for _, size, _ in kept)
        if taken <= self.limit_bytes:
            return
        for _, size, path in sorted(kept):
            _remove(path)
            taken -= size
            if taken <= _SWEPT_SHARE * self.limit_bytes:
                return


def sampled_digest(path: Path) -> bytes:
    """SHA-256 of a file's size, time, beginning and a page of each of 256 parts: weights differ in all of them."""
    found = path.stat()
    digest = hashlib.sha256(f"{found.st_size} {found.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLED_BYTES))
        for part in range(_SAMPLES):
            file.seek(found.st_size * part // _SAMPLES)
            digest.update(file.read(_PAGE_BYTES))
    return digest.digest()


def _check_owner(folder: Path) -> None:
    """Raise OSError for a folder in which somebody else could have written: contents are read as this user's own."""
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(0, "it must belong to this user, and no one else may write there")


def _digest(key: bytes, part: int, contents: NDArray[np.uint8]) -> bytes:
    """SHA-256 of a name, the sums of the pages of 4 KiB and what is left: as fast as memory is read."""
    whole = contents.size // _PAGE_BYTES * _PAGE_BYTES
    pages = contents[:whole].view(np.uint64).reshape(-1, _PAGE_BYTES // 8)
    digest = hashlib.sha256(key + part.to_bytes(4, "little") + contents.size.to_bytes(8, "little"))
    digest.update(pages.sum(axis=1, dtype=np.uint64))
    digest.update(contents[whole:].data)
    return digest.digest()


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root, name) for name in names if _NAME.fullmatch(name))


def _sizes(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Each file with its size, and the time of its last use."""
    for path in _files(folder):
        try:
            found = path.stat()
        except OSError:
            continue  # another process removed it
        yield path, found.st_size, found.st_mtime


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _LOG.warning("%s can't be removed: %s", path, error.strerror or error)
