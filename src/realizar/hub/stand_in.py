"""`StandIn`: a model on a hub, stood in for on this disk by files of its sizes of which only some bytes were read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from realizar.errors import HubError
from realizar.hub.endpoint import open_range, translated
from realizar.hub.names import RepositoryName
from realizar.hub.progress import RemoteFile
from realizar.sizes import format_bytes

Item = TypeVar("Item")

MOST_BYTES = 30_000_000
"""Bytes of files that are read for one model."""
_FIRST_BYTES = 128 << 10  # the header of a shard, as a rule
_LARGEST_STEP = 6 << 20  # a vocabulary takes several MB
_CONNECTIONS = 8
_READ_WHOLE = ("config.json", "hf_quant_config.json", "model.safetensors.index.json")
_VOCABULARY = ("tokenizer.json", "tokenizer_config.json")
_WEIGHTS = (".gguf", ".safetensors")


class StandIn:
    """Files in a folder, to be opened in place of a model's own; what was not read of them are holes, read as zeros.

    Attributes:
        read_bytes: bytes that were fetched so far.
    """

    def __init__(self, name: RepositoryName, commit: str | None, files: Sequence[RemoteFile], folder: Path) -> None:
        """`files`: the model's, labelled by their paths in the repository; the first is opened."""
        self.read_bytes = 0
        self._name, self._commit, self._files, self._folder = name, commit, files, folder
        self._lock = threading.Lock()

    def read_headers(self, holds_header: Callable[[Path], bool], *, vocabulary: bool = False) -> Path:
        """Read what precedes the tensors, and if wanted the files of a vocabulary; return the path to open.

        `holds_header` says of a file of which only the beginning is there whether that is enough. HubError: a file
        can't be read in parts, or the headers take more than `MOST_BYTES`.
        """
        whole = (*_READ_WHOLE, *(_VOCABULARY if vocabulary else ()))
        wanted = [file for file in self._files if file.label.lower().endswith(_WEIGHTS) or file.label in whole]
        _side_by_side(partial(self._read_header, holds_header), wanted)
        first = self._folder / self._files[0].label
        return first if first.suffix.lower() == ".gguf" else first.parent

    def read(self, parts: Sequence[tuple[Path, int, int]]) -> None:
        """Read more of files that stand in for the model's: from an offset to another."""
        _side_by_side(lambda part: self._copy(part[0].relative_to(self._folder).as_posix(), *part[1:]), parts)

    def _read_header(self, holds_header: Callable[[Path], bool], file: RemoteFile) -> None:
        path = self._folder / file.label
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        whole = not file.label.lower().endswith(_WEIGHTS)
        more, have = (file.size_bytes or 0 if whole else 0) or _FIRST_BYTES, 0
        while True:
            size = self._copy(file.label, have, have + more)
            have = min(have + more, size)
            if have == size or (not whole and holds_header(path)):
                break
            more = min(3 * have, _LARGEST_STEP)
        with path.open("r+b") as stream:
            stream.truncate(size)

    def _copy(self, file: str, start: int, stop: int) -> int:
        """Copy a part of a file to its place; returns the whole file's size."""
        with self._lock:
            stop = min(stop, start + MOST_BYTES - self.read_bytes)
            self.read_bytes += stop - start
        if stop <= start:
            raise HubError(f"{self._name}: more than {format_bytes(MOST_BYTES)} of it would have to be read to plan it")
        size, copied = translated(self._name, partial(self._request, file, start, stop))
        with self._lock:
            self.read_bytes -= stop - start - copied
        if copied != min(stop, size) - start:
            raise HubError(f"{self._name}: {file} was cut off in its header")
        return size

    def _request(self, file: str, start: int, stop: int) -> tuple[int, int]:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self._name.repo, file, revision=self._commit)
        with open_range(url, start, stop) as (size, chunks), (self._folder / file).open("r+b") as stream:
            stream.seek(start)
            return size, sum(map(stream.write, _cut(chunks, stop - start)))


def _side_by_side(read: Callable[[Item], object], items: Sequence[Item]) -> None:
    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        try:
            list(pool.map(read, items))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _cut(chunks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """The first bytes of an answer, whatever a server sends after them."""
    for chunk in chunks:
        yield chunk[:most]
        most -= len(chunk)
        if most <= 0:
            return
