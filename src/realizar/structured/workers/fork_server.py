"""The fork server: `python -m realizar.structured.workers.fork_server SOCKET MASKS [RING]`, started by `ServerHandle`.

It reads the vocabulary and forks workers, which takes milliseconds and shares the vocabulary's memory. It has one
thread and runs no grammar itself, so forking is safe. It ends when the other end of its socket closes. Its children end
with it (on Linux), and when their own sockets close.

SOCKET is the descriptor of its end of a pair of sockets, MASKS that of the shared memory for masks, and RING that of
its ring where there is one.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys

from realizar.errors import RealizarError
from realizar.ipc.frames import Channel, ChannelError
from realizar.structured.grammar import GrammarFactory
from realizar.structured.workers.mask_memory import NO_RING, MaskMemory
from realizar.structured.workers.messages import (
    Done,
    End,
    Ended,
    Fork,
    Forked,
    Refused,
    ToServer,
    ToWorker,
    Vocabulary,
)
from realizar.structured.workers.worker_process import WorkerProcess

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


class ForkServer:
    new_worker = WorkerProcess

    def __init__(self, channel: Channel[ToServer], masks: int, ring: int = NO_RING) -> None:
        self._channel, self._masks, self._ring = channel, masks, ring
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._pids: dict[int, int] = {}  # of workers, by their places

    def run(self) -> None:
        """Read the vocabulary, then start and end workers until the engine is gone."""
        vocabulary = self._channel.receive()
        if not isinstance(vocabulary, Vocabulary):
            raise ChannelError("the vocabulary must come first")
        try:
            factory = GrammarFactory(vocabulary.tokens)
        except (RealizarError, ValueError) as error:
            self._channel.send(Refused(" ".join(str(error).split())))
            return
        sizes = vocabulary.num_slots, vocabulary.most_drafts
        memory = MaskMemory(factory.num_words, *sizes, self._masks, num_lines=vocabulary.num_lines, ring=self._ring)
        del vocabulary
        gc.collect()
        gc.freeze()  # a collection in a child would copy the pages that it walks
        self._channel.send(Done())
        while True:
            command = self._channel.receive()
            if isinstance(command, End):
                self._channel.send(Ended(self._end(command.place)))
            elif isinstance(command, Fork):
                descriptor = self._channel.receive_descriptor()
                try:
                    self._pids[command.place] = pid = self._fork(command, descriptor, factory, memory)
                    self._channel.send(Forked(pid))
                except OSError as error:
                    self._channel.send(Refused(str(error.strerror)))
                finally:
                    os.close(descriptor)

    def _fork(self, command: Fork, descriptor: int, factory: GrammarFactory, memory: MaskMemory) -> int:
        server = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            if sys.platform == "linux":
                self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                self._libc.prctl(_PR_SET_DUMPABLE, 0)  # keeps core dumps away from collectors
                if os.getppid() != server:
                    os._exit(1)
            self._channel.close()
            channel: Channel[ToWorker] = Channel(socket.socket(fileno=os.dup(descriptor)), ToWorker)
            os.close(descriptor)
            self.new_worker(channel, factory, memory, command.place, command.memory_bytes).run()
        finally:
            os._exit(1)

    def _end(self, place: int) -> int | None:
        pid = self._pids.pop(place, None)
        if pid is None:
            return None
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(new_server: type[ForkServer] = ForkServer) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    try:
        channel: Channel[ToServer] = Channel(connection, ToServer, takes_descriptors=True)
        new_server(channel, *map(int, sys.argv[2:])).run()
    except ChannelError:
        return 0  # the engine is gone
    return 1


if __name__ == "__main__":
    sys.exit(main())
