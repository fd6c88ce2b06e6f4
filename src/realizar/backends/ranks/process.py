"""The process of a rank but the first: `python -m realizar.backends.ranks.process SOCKET MEMORY`, two descriptors.

It ends when the other end of the socket closes.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from realizar.backends.base import NO_OTHERS, Backend, ModelSource, SavesCache, Step
from realizar.backends.rank_memory import RankMemory, RankPlace
from realizar.backends.ranks.messages import (
    Cached,
    Call,
    Close,
    Defer,
    Heard,
    Join,
    Joined,
    Mask,
    Open,
    Read,
    ReadCached,
    Refused,
    Said,
    Sample,
    Submit,
    WriteCached,
    unpack_masks,
    unpack_step,
)
from realizar.backends.select import make_rank
from realizar.backends.supported import parts_of
from realizar.checkpoint.open import open_checkpoint
from realizar.errors import DeviceLostError
from realizar.ipc.error_records import record_error
from realizar.ipc.frames import Channel, ChannelError
from realizar.models.drafters.describe import describe_drafter
from realizar.models.registry import build_spec
from realizar.models.shard import shard

_LOG = logging.getLogger(__name__)


def run_rank(connection: socket.socket, memory_descriptor: int) -> int:
    """Load a rank and make its calls until the other end closes; returns the exit status."""
    channel: Channel[Call] = Channel(connection, Call)
    threading.Thread(target=_end_with_first, args=(channel.fileno(),), name="first-rank", daemon=True).start()
    try:
        join = channel.receive()
        assert isinstance(join, Join)
        _name_lines(f"rank {join.rank} of {join.ranks}")
        memory = RankMemory(join.ranks, join.floats, memory_descriptor)
        try:
            backend = _load(join, RankPlace(join.rank, join.ranks, memory, partial(_exchange, channel)))
        except Exception as error:  # noqa: BLE001 - the first rank raises it
            channel.send(Refused(record_error(error)))
            return 1
        channel.send(Joined(backend.capacity()))
        _follow(channel, backend)
    except ChannelError:
        return 0  # the first rank has closed
    except DeviceLostError:
        return 1  # another one is gone, which the first one says


def _name_lines(name: str) -> None:
    """Have each line of the log say whose it is, in the form that the engine's own have."""
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s %(name)s: {name}: %(message)s")


def _end_with_first(descriptor: int) -> None:
    """End at once with the first rank, also in the middle of a step that waits for it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def _exchange(channel: Channel[Call], word: bytes) -> Sequence[bytes]:
    channel.send(Said(word))
    answer = channel.receive()
    assert isinstance(answer, Heard)
    return answer.words


def _load(join: Join, place: RankPlace) -> Backend:
    checkpoint, sizes = open_checkpoint(Path(join.model)), (join.config.context_length, join.config.expert_used_count)
    spec = build_spec(checkpoint, *sizes)
    others = NO_OTHERS
    if join.drafter:
        drafter = checkpoint if join.config.drafter == "auto" else open_checkpoint(Path(join.drafter))
        found = describe_drafter(drafter, checkpoint, *sizes)
        assert found is not None  # as the first rank has it
        others = parts_of({"drafter": ModelSource(*found)}, join.rank, join.ranks)
    backend = make_rank(place, join.config.chosen)
    backend.load(shard(spec, join.rank, join.ranks, checkpoint), checkpoint, join.config, others)
    return backend


def _follow(channel: Channel[Call], backend: Backend) -> NoReturn:
    """Make every call that the first rank makes. The first rank says what one row asks for in vain."""
    steps: dict[int, Step] = {}  # that are not read yet
    number = -1
    while True:
        call = channel.receive()
        if isinstance(call, Submit):
            number += 1
            steps[number] = backend.submit(unpack_step(call))
        elif isinstance(call, Read):
            steps.pop(call.step).result()
        elif isinstance(call, Open):
            try:
                backend.open(call.opened)
            except MemoryError:
                raise  # which the first rank need not have
            except Exception as error:  # noqa: BLE001 - the row's alone, in every rank
                _LOG.debug("a row could not be opened", exc_info=error)
        elif isinstance(call, Close):
            backend.close(call.row)
        elif isinstance(call, ReadCached | WriteCached):
            _of_cache(call, backend, channel)
        else:
            _of_step(call, steps[number])


def _of_cache(call: ReadCached | WriteCached, backend: Backend, channel: Channel[Call]) -> None:
    assert isinstance(backend, SavesCache)
    places = list(call.places)
    if isinstance(call, ReadCached):
        channel.send(Cached(backend.read_cached(call.part, places)().tobytes()))
    else:
        contents = np.frombuffer(call.contents, np.uint8).reshape(len(places), -1)
        backend.write_cached(call.part, places, contents)()


def _of_step(call: Call, step: Step) -> None:
    if isinstance(call, Mask):
        step.set_masks(unpack_masks(call))
    elif isinstance(call, Defer):
        step.defer(call.rows)
    else:
        assert isinstance(call, Sample)
        step.sample()


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return run_rank(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
