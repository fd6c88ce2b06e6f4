"""`DiskCache`: blocks and snapshots of the prefix cache in files, written behind the steps and read before a request.

What a step computed is saved once the step has ended, as long as it is in the cache. A request whose prompt goes on
where the cache ends is queued when the files have been read into the cache, from which it then starts as from any other
prefix. So scheduler and steps know nothing of files.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import SavesCache
from realizar.backends.machine import num_processors
from realizar.errors import CapacityError, KernelError, RealizarError
from realizar.kv_cache.block_files import BlockFiles
from realizar.kv_cache.block_keys import BlockKeys
from realizar.kv_cache.manager import KVCacheManager
from realizar.request import Request
from realizar.scheduler.row_table import most_cached_tokens

_LOG = logging.getLogger(__name__)
_BATCH_BYTES = 32 << 20  # of files that a thread reads and checks, or one block where that is more
_BUFFERS = 20  # of so many bytes, into which files are read; fewer of larger blocks, but one for each fetch
_FETCHES = 4  # prompts that are read at once, each with a buffer
_MOST_WRITING = 2  # batches that wait for the disk; what does not fit waits in the cache, as long as it stays there
_IDLE_BYTES = 32 << 20  # copied at once to be written
_BUSY_S, _BUSY_BYTES = 0.05, 16 << 20  # between copies while requests run, and of each: steps wait for them
HOST_BYTES = _BUFFERS * _BATCH_BYTES + _MOST_WRITING * _IDLE_BYTES
"""The most that a `DiskCache` takes of the host's memory, of blocks and snapshots that are no larger than a batch."""
_USED_S = 60.0
_MOST_USED = 4096
_MOST_READERS = 16
_WRITERS = 2


class _Saved(NamedTuple):
    """A key whose block or snapshot is to be saved once `step`, counted from the start, has ended."""

    step: int
    key: bytes
    is_snapshot: bool


@dataclass(slots=True, eq=False)
class Fetch:
    """Reading the prefix of a prompt: its blocks of `keys`. `present` has what is in the cache already."""

    request: Request
    history: BlockKeys
    keys: Sequence[bytes]
    present: frozenset[tuple[int, bytes]]
    least: int  # blocks that the prompt starts from without it
    most_block_s: float  # in which a block is computed; reading is to be faster
    arrived: Arrived
    started_s: float = 0.0
    num_bytes: int = 0
    is_cancelled: bool = False


Arrived: TypeAlias = Callable[[Fetch, "Batch | None"], None]
"""Takes what was read for a request, on another thread, and None behind the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Contents that were read, uint8 [keys, bytes], of a part of the cache (`SavesCache`).

    `buffer` is the memory that they lie in.
    """

    part: int
    keys: Sequence[bytes]
    contents: NDArray[np.uint8]
    buffer: NDArray[np.uint8]


class _Reading(NamedTuple):
    batch: Batch
    are_read: Future[list[bool]]


@dataclass(frozen=True, slots=True)
class DiskCounts:
    """Blocks and snapshots since the start that were written to files, and read from them into the cache."""

    saved: int = 0
    fetched: int = 0


class DiskCache:
    """Used by the engine's thread; files are read and written by threads of its own, which `close` ends.

    Args:
        block_s: seconds in which a block of a prompt is computed by what was measured; None where nothing was yet.
    """

    def __init__(
        self, backend: SavesCache, cache: KVCacheManager, files: BlockFiles, block_s: Callable[[], float | None]
    ) -> None:
        self._backend, self._cache, self._files, self._block_s = backend, cache, files, block_s
        self._part_bytes = backend.part_bytes
        self._num_groups = len(cache.counts)
        self._batch_bytes = max(_BATCH_BYTES, *self._part_bytes)
        self._num_buffers = max(_BUFFERS * _BATCH_BYTES // self._batch_bytes, _FETCHES)
        self._num_submitted = self._num_ended = self._num_saved = self._num_fetched = 0
        num_places = sum(counts.total for counts in cache.counts) + cache.snapshots.counts.total
        self._unsaved: deque[_Saved] = deque(maxlen=2 * num_places)  # what came first is the first to be given up
        self._saved_s = 0.0
        self._read_s: float | None = None  # of a byte
        self._is_closed = False
        self._buffers: SimpleQueue[NDArray[np.uint8]] | None = None  # made for the first fetch
        self._making = Lock()
        self._writing: deque[Future[int]] = deque()
        self._reading: set[Fetch] = set()
        self._looked_up: tuple[Request | None, BlockKeys | None] = None, None
        self._used_s: dict[bytes, float] = {}  # when files were last noted to be of use, by the last key of a history
        readers = min(_MOST_READERS, num_processors())
        self._fetches = ThreadPoolExecutor(_FETCHES, "realizar-fetch")
        self._readers = ThreadPoolExecutor(readers, "realizar-read")
        self._writers = ThreadPoolExecutor(_WRITERS, "realizar-write")
        cache.watch = self

    @property
    def counts(self) -> DiskCounts:
        return DiskCounts(self._num_saved, self._num_fetched)

    # What the cache tells, as its `CacheWatch`.

    def added(self, keys: Sequence[bytes]) -> None:
        self._unsaved += [_Saved(self._num_submitted + 1, key, is_snapshot=False) for key in keys]

    def snapped(self, key: bytes) -> None:
        self._unsaved.append(_Saved(self._num_submitted + 1, key, is_snapshot=True))

    def forgotten(self) -> None:
        self._unsaved.clear()

    # Saving.

    def submitted(self) -> None:
        """A step was submitted."""
        self._num_submitted += 1

    def ended(self, *, all_steps: bool = False) -> None:
        """The oldest step in flight has ended, or all have, as they were given up."""
        self._num_ended = self._num_submitted if all_steps else self._num_ended + 1

    def save(self, *, is_idle: bool) -> bool:
        """Have some of what was computed written, if it is time to. True where there is more for later."""
        while self._writing and self._writing[0].done():
            self._num_saved += self._writing.popleft().result()
        if not self._files.takes_more:
            self._unsaved.clear()
        now_s = time.monotonic()
        if self._unsaved and len(self._writing) < _MOST_WRITING and (is_idle or now_s - self._saved_s > _BUSY_S):
            self._saved_s = now_s
            for part, places in self._next_places(_IDLE_BYTES if is_idle else _BUSY_BYTES).items():
                try:
                    contents = self._backend.read_cached(part, list(places.values()))
                except (CapacityError, KernelError) as error:
                    _LOG.warning("%d blocks are not saved: %s", len(places), error)
                    continue
                self._writing.append(
                    self._writers.submit(self._write, part, list(places), contents, self._files.generation)
                )
        return bool(self._unsaved)

    def _next_places(self, left: int) -> dict[int, dict[bytes, int]]:
        """By part of the cache, the next places to be saved by their keys: those of `left` bytes, and one more."""
        found: dict[int, dict[bytes, int]] = {}
        all_ended = self._num_ended == self._num_submitted
        while self._unsaved and (all_ended or self._unsaved[0].step <= self._num_ended) and left > 0:
            saved = self._unsaved.popleft()
            for part in [self._num_groups] if saved.is_snapshot else range(self._num_groups):
                place = self._cache.found(part, saved.key)
                if place is not None and not self._files.has(saved.key, part):
                    found.setdefault(part, {})[saved.key] = place
                    left -= self._part_bytes[part]
        return found

    def _write(
        self, part: int, keys: Sequence[bytes], contents: Callable[[], NDArray[np.uint8]], generation: int
    ) -> int:
        """Write a batch, on a writer's thread; the number of files."""
        written = 0
        try:
            for key, row in zip(keys, contents(), strict=True):
                if not self._is_closed and self._files.takes_more:
                    written += self._files.write(key, part, row, generation)
        except RealizarError as error:
            _LOG.warning("blocks could not be copied from the device: %s", error)
        except Exception:  # noqa: BLE001 - of what is only to be faster
            _LOG.exception("blocks could not be saved")
        return written

    # Reading.

    def fetch(self, request: Request, arrived: Arrived) -> Fetch | None:
        """Start to read what the files have of a request's prompt beyond the cache; None where they have nothing."""
        cache, size = self._cache, self._cache.block_size
        most = most_cached_tokens(request, request.num_prompt_tokens) // size if cache.prefix_cache else 0
        if not most:
            return None
        token_ids = np.array(request.prompt_token_ids, np.int32)
        history = BlockKeys(size, request.cache_salt, request.embeddings)
        self._looked_up = request, history
        least = cache.find_prefix(history, token_ids, most * size).num_tokens // size
        keys = history.of(token_ids)[:most]
        self._use(keys[:least])
        if least == most or not all(self._is_kept(part, keys[least]) for part in cache.whole_groups):
            return None  # nearly always
        parts = range(len(self._part_bytes))
        present = {(part, key) for part in parts for key in keys if cache.has(part, key)}
        block_s = self._block_s()
        started = Fetch(
            request, history, keys, frozenset(present), least, math.inf if block_s is None else block_s, arrived
        )
        for part in range(self._num_groups):
            cache.touch(part, keys)
        self._reading.add(started)
        self._fetches.submit(self._run, started)
        return started

    @property
    def num_fetching(self) -> int:
        """Requests that come once files are read."""
        return len(self._reading)

    def keys_of(self, request: Request) -> BlockKeys | None:
        """Those that were made for the request that was looked up, or read, last; None of any other."""
        (known, keys), self._looked_up = self._looked_up, (None, None)
        return keys if known is request else None

    def take_in(self, fetch: Fetch, batch: Batch | None) -> None:
        """Write what was read into the cache, from which the next request may start; not if it was cancelled."""
        if self._is_closed:
            return
        if batch is None:
            self._reading.discard(fetch)
            self._looked_up = fetch.request, fetch.history
            self._use(fetch.keys)
            return
        waits: Callable[[], None] | None = None
        try:
            if not fetch.is_cancelled:
                waits = self._write_cached(fetch, batch)
        except (CapacityError, KernelError) as error:
            _LOG.warning("the prefix cache is forgotten, as blocks could not be written to it: %s", error)
            fetch.is_cancelled = True
            self._cache.forget()
        self._readers.submit(self._give_back, waits, batch.buffer)

    def _write_cached(self, fetch: Fetch, batch: Batch) -> Callable[[], None] | None:
        """Write what the cache lacks of a batch; what waits until it was read. Without room no more is taken in."""
        cache, keys = self._cache, batch.keys
        rows = [row for row, key in enumerate(keys) if not cache.has(batch.part, key)]
        if not rows:
            return None
        if batch.part == self._num_groups:
            places = self._put_snapshot(keys[rows[0]], fetch.request.client.name)
        else:
            places = cache.put(batch.part, [keys[row] for row in rows], fetch.keys)
        fetch.is_cancelled = len(places) < len(rows)
        if not places:
            return None
        rows = rows[: len(places)]
        contents = batch.contents if len(rows) == len(keys) else batch.contents[rows]
        waits = self._backend.write_cached(batch.part, places, contents)
        self._num_fetched += len(places)
        return waits

    def _put_snapshot(self, key: bytes, client: str) -> list[int]:
        """The snapshot to write, if the block is there that it follows."""
        if not all(self._cache.has(part, key) for part in range(self._num_groups)):
            return []
        snapshot = self._cache.snapshots.put(key, client)
        return [] if snapshot is None else [snapshot]

    def cancel(self) -> None:
        """Let nothing be taken in of what is being read."""
        for fetch in self._reading:
            fetch.is_cancelled = True

    def _give_back(self, waits: Callable[[], None] | None, buffer: NDArray[np.uint8]) -> None:
        assert self._buffers is not None
        try:
            if waits is not None:
                waits()
        finally:
            self._buffers.put(buffer)

    def _is_kept(self, part: int, key: bytes) -> bool:
        """True if the cache or a file has it."""
        return self._cache.has(part, key) or self._files.has(key, part)

    def _has(self, fetch: Fetch, part: int, key: bytes) -> bool:
        """As `_is_kept` was when the fetch began, for the thread that reads."""
        return (part, key) in fetch.present or self._files.has(key, part)

    def _run(self, fetch: Fetch) -> None:
        """Read a prefix, on a thread of fetches."""
        try:
            fetch.started_s = time.monotonic()
            self._read_all(fetch, deque(self._wanted(fetch)))
            if fetch.num_bytes:
                seconds = (time.monotonic() - fetch.started_s) / fetch.num_bytes
                self._read_s = seconds if self._read_s is None else (self._read_s + seconds) / 2
        except Exception:  # noqa: BLE001 - of what is only to be faster
            _LOG.exception("a prefix could not be read")
        finally:
            fetch.arrived(fetch, None)

    def _read_all(self, fetch: Fetch, wanted: deque[tuple[int, list[bytes]]]) -> None:
        reading, goes_on = deque[_Reading](), True
        most = self._num_buffers * 4 // 5  # a prompt leaves some to others, and to what is on its way to the device
        try:
            while goes_on and (wanted or reading):
                while wanted and len(reading) < most and not self._is_closed:
                    if (buffer := self._free_buffer(waits=not reading)) is None:
                        break
                    reading.append(self._start(buffer, *wanted.popleft()))
                goes_on = bool(reading) and self._hand_on(fetch, reading[0])
                if reading:
                    reading.popleft()
        finally:
            for left in reading:
                self._put_back(left)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Note in a while's first use of a history that its files are of use, the beginning last: it goes last."""
        now_s = time.monotonic()
        if not keys or now_s - self._used_s.get(keys[-1], -math.inf) < _USED_S:
            return
        if len(self._used_s) >= _MOST_USED:
            self._used_s.clear()
        self._used_s[keys[-1]] = now_s
        for part in range(len(self._part_bytes)):
            self._writers.submit(self._files.used, keys[::-1], part)

    def _wanted(self, fetch: Fetch) -> list[tuple[int, list[bytes]]]:
        """What is to be read, in batches of one part, blocks before the snapshot behind them."""
        parts = range(len(self._part_bytes))
        _, end = self._cache.usable(fetch.keys, [partial(self._has, fetch, part) for part in parts])
        keys, batches = fetch.keys[:end], []
        for part in range(self._num_groups):
            seen = [keys[block] for block in self._cache.seen_blocks(part, end)]
            missing = [key for key in seen if (part, key) not in fetch.present]
            most = self._batch_bytes // self._part_bytes[part]
            batches += [(part, missing[first : first + most]) for first in range(0, len(missing), most)]
        if end and self._cache.has_state and (self._num_groups, keys[-1]) not in fetch.present:
            batches.append((self._num_groups, [keys[-1]]))
        num_bytes = sum(self._part_bytes[part] * len(own) for part, own in batches)
        is_faster = self._read_s is None or self._read_s * num_bytes < fetch.most_block_s * (end - fetch.least)
        return batches if is_faster else []

    def _free_buffer(self, *, waits: bool) -> NDArray[np.uint8] | None:
        """A buffer to read into; None where it need not wait for one, as others read, or the engine ends."""
        with self._making:
            if self._buffers is None:
                made = [self._backend.new_buffer(self._batch_bytes) for _ in range(self._num_buffers)]
                self._buffers = SimpleQueue()
                for each in made:
                    self._buffers.put(each)
        try:
            buffer = self._buffers.get(block=waits)
        except Empty:
            return None
        return None if self._is_closed else buffer

    def _start(self, buffer: NDArray[np.uint8], part: int, keys: list[bytes]) -> _Reading:
        """Start to read a batch."""
        size = self._part_bytes[part]
        contents = buffer[: len(keys) * size].reshape(len(keys), size)
        return _Reading(
            Batch(part, keys, contents, buffer), self._readers.submit(self._files.read, keys, part, contents)
        )

    def _hand_on(self, fetch: Fetch, reading: _Reading) -> bool:
        """Hand on a batch; False where a file of it is missing or damaged, or nothing is wanted any more."""
        batch, are_read = reading.batch, reading.are_read.result()
        if fetch.is_cancelled or self._is_closed:
            self._put_back(reading)
            return False
        whole = are_read.index(False) if False in are_read else len(batch.keys)
        fetch.num_bytes += whole * self._part_bytes[batch.part]
        fetch.arrived(fetch, replace(batch, keys=batch.keys[:whole], contents=batch.contents[:whole]))
        return whole == len(batch.keys)

    def _put_back(self, reading: _Reading) -> None:
        assert self._buffers is not None
        wait([reading.are_read])
        self._buffers.put(reading.batch.buffer)

    def clear(self) -> None:
        """Let none of this model's files be found; they are removed behind the steps."""
        self.cancel()
        self._unsaved.clear()
        self._files.clear()
        self._writers.submit(self._files.remove_cleared)

    def close(self) -> None:
        """End all threads; what is not written yet is lost. Idempotent."""
        self._is_closed = True
        self._cache.watch = None
        if self._buffers is not None:
            for _ in range(_FETCHES):
                self._buffers.put(np.zeros(0, np.uint8))  # for fetches that wait for one
        for pool in (self._fetches, self._writers, self._readers):
            pool.shutdown(cancel_futures=True)
