"""`RankedBackend`: a model that several processes compute together, of which the engine's is the first rank."""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import (
    NO_OTHERS,
    Backend,
    Capacity,
    DeviceMemory,
    FetchesSnapshots,
    ForwardInput,
    OtherModels,
    SavesCache,
    Step,
)
from realizar.backends.rank_memory import RankMemory, RankPlace
from realizar.backends.ranks.messages import (
    Answer,
    Cached,
    Call,
    Close,
    Defer,
    Heard,
    Join,
    Joined,
    Open,
    Read,
    ReadCached,
    Refused,
    Said,
    Sample,
    WriteCached,
    pack_masks,
    pack_step,
)
from realizar.backends.resolved_config import ResolvedConfig
from realizar.backends.supported import find_drafter, parts_of
from realizar.batch import OpenedRow, StepOutput
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import DeviceLostError, InvalidRequestError, UnsupportedModelError
from realizar.ipc.error_records import restore_error
from realizar.ipc.frames import MAX_FRAME_BYTES, Channel, ChannelError
from realizar.ipc.process_limits import end_of, start_process, state_of
from realizar.models.shard import shard
from realizar.models.spec import ModelSpec

_LOG = logging.getLogger(__name__)
_COMMAND = (sys.executable, "-m", "realizar.backends.ranks.process")
_LOOK_S = 1.0  # between looks at whether a rank is stopped; that one has ended is seen at once
_MOST_STOPPED = 5  # such looks in a row
_MOST_SILENT = 30  # looks in a row at a rank for which others wait in one exchange: parts may differ by seconds
_END_S = 2.0
_Found = TypeVar("_Found")


class _Rank:
    """Another rank's process. It raises OSError where it can't be started."""

    def __init__(self, number: int, memory: RankMemory) -> None:
        self.number = number
        self.process, ours = start_process(_COMMAND, memory.descriptor)
        self.channel: Channel[Answer] = Channel(ours, Answer)
        self.end_descriptor = os.pidfd_open(self.process.pid)
        self.num_stopped = 0

    def send(self, call: Call) -> None:
        """ChannelError: it has ended."""
        self.channel.send(call)

    def joined(self) -> Capacity:
        """Wait until it has loaded. Raises as `_answer`."""
        answer = self._answer()
        assert isinstance(answer, Joined)
        return answer.capacity

    def word(self) -> bytes:
        """Wait for its word in an exchange. Raises as `_answer`."""
        answer = self._answer()
        assert isinstance(answer, Said)
        return answer.word

    def cache_contents(self) -> bytes:
        """Wait for its contents of the cache. ChannelError: it has ended."""
        answer = self._answer()
        assert isinstance(answer, Cached)
        return answer.contents

    def _answer(self) -> Said | Joined | Cached:
        """Raises what its load did; ChannelError: it has ended."""
        answer = self.channel.receive()
        if isinstance(answer, Refused):
            raise restore_error(answer.error)
        return answer

    @property
    def is_stopped(self) -> bool:
        return state_of(self.process.pid) in ("T", "t")

    def end(self) -> None:
        """Wait until it has ended, whose channel is closed."""
        try:
            self.process.wait(0.0 if self.is_stopped else _END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.end_descriptor)


class RankedBackend:
    """A backend of the first rank, whose calls all others get before it makes them.

    Each rank samples every row for itself: they have the same logits, and so the same tokens. A rank that ends or is
    stopped ends the engine by `DeviceLostError`, and so does whatever fails in one rank alone.

    Args:
        ranks: 2 or more.
        prepare: gives the float32 of a slot in the memory that ranks share, and a configuration of each rank, but for
            its device, from what is given for the whole model.
        make: a backend of the first rank, not loaded.
    """

    def __init__(
        self,
        ranks: int,
        prepare: Callable[[ModelSpec, Checkpoint, ResolvedConfig, OtherModels], tuple[int, ResolvedConfig]],
        make: Callable[[RankPlace], Backend],
    ) -> None:
        self._count, self._prepare, self._make = ranks, prepare, make
        self._own: Backend | None = None
        self._memory: RankMemory | None = None
        self._others: list[_Rank] = []
        self._capacity: Capacity | None = None
        self._lost = ""  # why no call can be made any more
        self._on_loss: Callable[[], None] = _nothing
        self._num_steps = self._num_silent = 0
        self._num_exchanges: list[int] = []  # at the last look
        self._last: RankedStep | None = None
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    def load(
        self, spec: ModelSpec, checkpoint: Checkpoint, config: ResolvedConfig, others: OtherModels = NO_OTHERS
    ) -> None:
        if sys.platform != "linux":
            raise UnsupportedModelError("ranks share memory as Linux has it, and this is another system")
        find_drafter(others, spec, config)
        if config.max_step_tokens * spec.hidden_size * (1 + spec.deepstack) * 4 > MAX_FRAME_BYTES // 2:
            raise InvalidRequestError(
                "max_step_tokens is too large for processes that compute together", "max_step_tokens"
            )
        floats, config = self._prepare(spec, checkpoint, config, others)
        memory = self._memory = RankMemory(self._count, floats)
        for number in range(1, self._count):
            self._others.append(_Rank(number, memory))
        self._watcher = threading.Thread(target=self._watch, args=(tuple(self._others),), name="ranks", daemon=True)
        self._watcher.start()
        for other in self._others:
            own = replace(config, chosen=config.chosen.of_rank(other.number))
            join = Join(str(checkpoint.path), _path_of(others), own, other.number, self._count, floats)
            self._ask(other, partial(_Rank.send, call=join))
        try:
            self._own = self._make(RankPlace(0, self._count, memory, self._exchange))
            part = shard(spec, 0, self._count, checkpoint)
            self._own.load(part, checkpoint, config, parts_of(others, 0, self._count))
            self.check()
        except Exception as error:
            if not self._lost:
                raise
            for other in self._others:  # one may have said why it could not load
                with suppress(DeviceLostError):
                    self._ask(other, _Rank.joined)
            raise DeviceLostError(self._lost) from error
        self._capacity = _together([self._own.capacity(), *(self._ask(each, _Rank.joined) for each in self._others)])
        _LOG.info("%d processes compute %s together", self._count, spec.architecture)

    def _exchange(self, word: bytes) -> Sequence[bytes]:
        words = (word, *(self._ask(other, _Rank.word) for other in self._others))
        self.send(Heard(words))
        return words

    def _ask(self, rank: _Rank, ask: Callable[[_Rank], _Found]) -> _Found:
        """DeviceLostError: the rank is gone."""
        try:
            return ask(rank)
        except ChannelError as error:
            with suppress(subprocess.TimeoutExpired):
                self._lose(f"{self._name(rank)} {end_of(rank.process.wait(_END_S))}")
            self._lose(f"{self._name(rank)} hears nothing: {error}")
            raise DeviceLostError(self._lost) from error

    def capacity(self) -> Capacity:
        if self._capacity is None:
            raise RuntimeError("no model is loaded")
        return self._capacity

    def device_memory(self) -> DeviceMemory | None:
        return self.own.device_memory()

    @property
    def snapshot_bytes(self) -> int:
        return self._count * self._fetches.snapshot_bytes

    def time_fetch(self) -> float:
        return self._fetches.time_fetch()

    @property
    def _fetches(self) -> FetchesSnapshots:
        assert isinstance(self.own, FetchesSnapshots)  # each rank's backend has host snapshots of its own
        return self.own

    @property
    def part_bytes(self) -> tuple[int, ...]:
        return tuple(self._count * size for size in self._saves.part_bytes)

    @property
    def layout(self) -> str:
        return f"{self._saves.layout}, side by side of {self._count} ranks"

    def new_buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        return self._saves.new_buffer(num_bytes)

    def read_cached(self, part: int, places: Sequence[int]) -> Callable[[], NDArray[np.uint8]]:
        """All ranks' contents side by side, copied now."""
        with self.step():
            self.send(ReadCached(part, tuple(places)))
            contents = [self._saves.read_cached(part, places)()]
            for other in self._others:
                found = np.frombuffer(self._ask(other, _Rank.cache_contents), np.uint8)
                contents.append(found.reshape(contents[0].shape))
            whole = np.concatenate(contents, axis=1)
        return lambda: whole

    def write_cached(self, part: int, places: Sequence[int], contents: NDArray[np.uint8]) -> Callable[[], None]:
        own, *of_others = np.split(contents, self._count, axis=1)
        with self.step():
            self.check()
            for other, its in zip(self._others, of_others, strict=True):
                self._ask(other, partial(_Rank.send, call=WriteCached(part, tuple(places), its.tobytes())))
            return self._saves.write_cached(part, places, own)

    @property
    def _saves(self) -> SavesCache:
        assert isinstance(self.own, SavesCache)
        return self.own

    @property
    def own(self) -> Backend:
        """The first rank's. RuntimeError where none is loaded."""
        if self._own is None:
            raise RuntimeError("no model is loaded")
        return self._own

    def open(self, opened: OpenedRow) -> None:
        self.send(Open(opened))
        self.own.open(opened)

    def close(self, row: int) -> None:
        with suppress(DeviceLostError):
            self.send(Close(row))
        self.own.close(row)

    def submit(self, forward_input: ForwardInput) -> RankedStep:
        with self.step():
            self.send(pack_step(forward_input))
            if self._last is not None:
                self._last.sampled = True  # by every rank, before the next
            self._last = RankedStep(self, self.own.submit(forward_input), self._num_steps)
            self._num_steps += 1
            return self._last

    def send(self, call: Call) -> None:
        """Send a call to all other ranks. DeviceLostError: one is gone."""
        self.check()
        for other in self._others:
            self._ask(other, partial(_Rank.send, call=call))

    def watch(self, lost: Callable[[], None]) -> None:
        self._on_loss = lost

    def check(self) -> None:
        """DeviceLostError: a rank is gone, and what was computed since then means nothing."""
        if not self._lost and self._memory is not None and self._memory.is_broken:
            self._lose(f"a rank of {self._count} sent no sums for which the others waited")  # which their kernels saw
        if self._lost:
            raise DeviceLostError(self._lost)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What fails here or in another rank leaves them apart, so that none can go on."""
        try:
            yield
            self.check()
        except DeviceLostError as error:
            raise DeviceLostError(self._lost or str(error)) from error
        except Exception as error:
            self._lose(f"rank 0 of {self._count} can't go on with the others: {type(error).__name__}: {error}")
            raise DeviceLostError(self._lost) from error
        except BaseException:
            self._lose("a step was broken off")
            raise

    def _lose(self, reason: str) -> None:
        """Let nobody wait for others. They end: none can go on, and a device may wait for another one for ever."""
        self._lost = self._lost or reason
        if self._memory is not None:
            self._memory.break_off()
        for other in self._others:
            other.process.kill()
        self._on_loss()

    def _name(self, rank: _Rank) -> str:
        return f"rank {rank.number} of {self._count} (process {rank.process.pid})"

    def _watch(self, others: Sequence[_Rank]) -> None:
        """Break steps off once a rank is gone. A stopped one is ended: steps that wait for it would wait for ever."""
        poll, ends = select.poll(), {other.end_descriptor: other for other in others}
        for descriptor in ends:
            poll.register(descriptor, select.POLLIN)
        while not self._closing.is_set():
            ended = poll.poll(1e3 * _LOOK_S)
            if self._closing.is_set():
                return
            for descriptor, _ in ended:
                self._lose(f"{self._name(ends[descriptor])} {end_of(ends[descriptor].process.wait())}")
                return
            self._look(others)

    def _look(self, others: Sequence[_Rank]) -> None:
        self._look_for_silence()
        for other in others:
            other.num_stopped = other.num_stopped + 1 if other.is_stopped else 0
            if other.num_stopped >= _MOST_STOPPED:
                self._lose(f"{self._name(other)} was stopped")

    def _look_for_silence(self) -> None:
        """Of ranks that have loaded: one that others wait for, and that no signal has stopped."""
        memory = self._memory
        if memory is None or self._capacity is None:
            return
        counts, before = memory.num_exchanges(), self._num_exchanges
        waits = len(set(counts)) > 1 and counts == before
        self._num_exchanges, self._num_silent = counts, self._num_silent + 1 if waits else 0
        if self._num_silent >= _MOST_SILENT:
            self._lose(f"rank {counts.index(min(counts))} of {self._count} has stalled")

    def shutdown(self) -> None:
        self._closing.set()
        self._lost = self._lost or "the model is closed"
        if self._memory is not None:
            self._memory.break_off()
        others, self._others = self._others, []
        for other in others:
            other.channel.close()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        for other in others:
            other.end()
        own, self._own = self._own, None
        self._last = None
        if own is not None:
            own.shutdown()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


class RankedStep:
    """A step of the first rank, whose calls all others get: but for its reading, before the next step, which samples
    it.
    """

    def __init__(self, backend: RankedBackend, own: Step, number: int) -> None:
        self._backend, self._own, self._number = backend, own, number
        self.sampled = self._is_read = False

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        with self._backend.step():
            self._backend.send(pack_masks(masks))
            self._own.set_masks(masks)

    def defer(self, rows: Collection[int]) -> None:
        with self._backend.step():
            self._backend.send(Defer(tuple(rows)))
            self._own.defer(rows)

    def sample(self) -> None:
        with self._backend.step():
            self._send_sample()
            self._own.sample()

    def result(self) -> StepOutput:
        with self._backend.step():
            self._send_sample()
            if not self._is_read:
                self._is_read = True
                self._backend.send(Read(self._number))
            return self._own.result()

    def _send_sample(self) -> None:
        if not self.sampled:
            self.sampled = True
            self._backend.send(Sample())


def _nothing() -> None:
    """Nobody watches yet."""


def _path_of(others: OtherModels) -> str:
    """Of what drafts, or nothing."""
    return next((str(each.checkpoint.path) for each in others.values()), "")


def _together(capacities: list[Capacity]) -> Capacity:
    """The capacity of all ranks, whose blocks are parts of the same ones."""
    first = capacities[0]
    numbers = {(each.num_blocks, each.num_snapshots, each.num_host_snapshots) for each in capacities}
    if len(numbers) > 1:
        raise RuntimeError(f"ranks have other numbers of blocks and snapshots: {numbers}")
    return replace(
        first,
        weight_bytes=sum(each.weight_bytes for each in capacities),
        weight_bytes_per_token=sum(each.weight_bytes_per_token for each in capacities),
        kv_cache_bytes=sum(each.kv_cache_bytes for each in capacities),
        load_s=max(each.load_s for each in capacities),
    )
