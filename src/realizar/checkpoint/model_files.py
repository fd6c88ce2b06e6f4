"""`ModelFiles` checks later, without parsing, that the files of an opened checkpoint are whole and unchanged.

A server maps a model's files for as long as it runs, and a new engine opens them again. Meanwhile they may be deleted,
truncated or replaced. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from realizar.checkpoint.checkpoint import Checkpoint

Signature: TypeAlias = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """A file's original size, and the SHA-256 of the bytes before its tensors (all bytes if it has none)."""

    path: Path
    size: int
    header_size: int
    digest: bytes


class ModelFiles:
    """The files of a checkpoint that was opened just now; raises OSError where one can't be read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        starts: dict[Path, int] = {}
        for tensor in checkpoint.tensors.values():
            starts[tensor.path] = min(starts.get(tensor.path, tensor.offset), tensor.offset)
        folder = checkpoint.path if checkpoint.path.is_dir() else None
        beside = [] if folder is None else sorted(folder.glob("*.json"))
        known = [_known(path, start) for path, start in sorted(starts.items())]
        self._known = tuple(known + [_known(path, None) for path in beside if path not in starts])

    def signature(self) -> Signature:
        """Size, modification time and inode of each file; None for a missing file. Any change gives another value."""
        return tuple(_stat(known.path) for known in self._known)

    def fault(self) -> str | None:
        """Why the model can't be loaded from its files now, naming one, or None; reads only bytes before tensors."""
        return next((fault for known in self._known if (fault := _fault(known)) is not None), None)

    def shown(self, text: str) -> str:
        """A text with the files' paths cut to their names, so that clients see no folders."""
        for known in self._known:
            text = text.replace(os.fspath(known.path), known.path.name)
        return text


def _known(path: Path, header_size: int | None) -> _Known:
    size = path.stat().st_size
    header_size = size if header_size is None else header_size
    return _Known(path, size, header_size, _digest(path, header_size))


def _digest(path: Path, size: int) -> bytes:
    with path.open("rb") as stream:
        return hashlib.sha256(stream.read(size)).digest()


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _fault(known: _Known) -> str | None:
    name = known.path.name
    try:
        size = known.path.stat().st_size
        if size < known.size:
            return f"{name} has {size} bytes instead of {known.size}"
        if _digest(known.path, known.header_size) != known.digest:
            return f"{name} is another file than when the server was started; start the server again to serve it"
    except FileNotFoundError:
        return f"{name} is gone"
    except OSError as error:
        return f"{name} can't be read: {error.strerror or error}"
    return None
