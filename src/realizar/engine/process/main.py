"""The engine process: `python -m realizar.engine.process.main FD`, started by `engine.process.supervisor`.

It ends when the other end of FD, a socket, closes. Signals to the whole group are its parent's: it ignores them.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from realizar.backends.load_progress import LoadProgress
from realizar.backends.select import begun_load
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.delta_shares import named_numbers, share_of
from realizar.engine.loading import find_checkpoint, load_core, load_fitting_core
from realizar.engine.process.loop import EngineLoop
from realizar.engine.process.messages import Command, Event, Failed, Load, Loading, Outputs, Ping, Pong
from realizar.ipc.frames import MAX_FRAME_BYTES, FrameError, FrameReader, encode_frame
from realizar.ipc.with_parent import leave_signals_to_parent
from realizar.outputs import RowError
from realizar.step_deltas import RequestFailure, StepDeltas

_LOG = logging.getLogger(__name__)
_RECEIVE_BYTES = 1 << 18
SWITCH_INTERVAL_S = 0.0005
"""Seconds that other threads, as that of pictures, keep the interpreter from the loop, which launches many kernels."""
_TOO_LARGE = "a step's results for the request are too large to be sent"

Loader = Callable[[Load, LoadProgress], EngineCore]


def load_model(load: Load, progress: LoadProgress) -> EngineCore:
    checkpoint, config = find_checkpoint(load.model), load.config
    with begun_load(config):
        if load.fit_context and config.context_length is None:
            core = load_fitting_core(checkpoint, config, progress=progress, may_restart=True)
        else:
            core = load_core(checkpoint, config, progress=progress, may_sleep=load.may_sleep, may_restart=True)
    progress("reading the vocabulary", 1.0)
    core.grammars.read_vocabulary()  # at the first grammar this would delay all requests by a second or more
    gc.collect()
    gc.freeze()  # the loaded objects stay: a collection that walks them would delay every stream by about 0.1 s
    return core


def take_place(load: Load) -> None:
    """Give this process its share of the machine; before anything opens a GPU, and for threads that run already."""
    if load.visible_gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = load.visible_gpus
    if load.cores and sys.platform == "linux":
        for thread in Path("/proc/self/task").iterdir():
            try:
                os.sched_setaffinity(int(thread.name), load.cores)
            except OSError as error:
                _LOG.warning("the process could not be pinned to cores %s: %s", list(load.cores), error.strerror)
                return


class EngineProcess:
    """One end of the socket. A thread of its own receives commands; the engine runs on the caller's thread."""

    def __init__(self, connection: socket.socket, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._connection, self._max_frame_bytes = connection, max_frame_bytes
        self._sending = threading.Lock()
        self._failed = False
        self._loop = EngineLoop(self._report)
        self._load_command: Load | None = None
        self._may_load = threading.Event()

    def run(self, loader: Loader) -> int:
        threading.Thread(target=self._receive, name="engine-inbox", daemon=True).start()
        self._report(Loading("starting", 0.0))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._may_load.wait()
        command = self._load_command
        if command is not None:
            self._loop.run(lambda: loader(command, lambda what, share: self._report(Loading(what, share))))
        return int(self._failed)

    def _receive(self) -> None:
        """Read commands. Pings are answered on this thread, so that they are answered during a step too."""
        reader: FrameReader[Command] = FrameReader(Command)
        try:
            while data := self._connection.recv(_RECEIVE_BYTES):
                for command in reader.feed(data):
                    self._sort(command)
        except FrameError as error:
            _LOG.critical("the server sent a malformed command: %s", error)
        except ConnectionResetError:
            pass  # the parent ended with events unread
        except OSError as error:
            _LOG.critical("the connection to the server failed: %s", error)
        os._exit(1)  # the parent is gone, so the running step has no purpose

    def _sort(self, command: Command) -> None:
        if isinstance(command, Ping):
            self._report(Pong(self._loop.step_age_s))
        elif isinstance(command, Load):
            take_place(command)
            logging.getLogger("realizar").setLevel(command.log_level)  # numba's own log would drown the rest
            self._load_command = command
            self._may_load.set()
        else:
            self._loop.post(command)

    def _report(self, event: Event) -> None:
        """Send an event. This waits while the parent is behind, which bounds the bytes in transit."""
        self._failed |= isinstance(event, Failed)
        try:
            frames = [encode_frame(event, self._max_frame_bytes)]
        except FrameError:
            if not isinstance(event, Outputs):
                raise
            frames = self._frames_apart(event.deltas)
        try:
            for frame in frames:
                with self._sending:
                    self._connection.sendall(frame)
        except OSError:
            os._exit(1)

    def _frames_apart(self, deltas: StepDeltas) -> list[bytearray]:
        """A frame for each choice of a step whose deltas don't fit one. One too large alone ends its request."""
        frames: list[bytearray] = []
        for number in named_numbers(deltas):
            part = share_of(deltas, {number})
            try:
                frames.append(encode_frame(Outputs(part), self._max_frame_bytes))
            except FrameError as error:
                _LOG.warning("a request ended: %s", error)
                self._loop.abort_unsent(number)
                refusal = RequestFailure(number, RowError(_TOO_LARGE, "request"))
                part = StepDeltas(part.produced_s, starts=part.starts, failures=(refusal,))
                frames.append(encode_frame(Outputs(part)))
        return frames


def run_process(descriptor: int, loader: Loader = load_model) -> int:
    """Run an engine on a socket until its parent ends it; returns the exit status."""
    leave_signals_to_parent()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    return EngineProcess(socket.socket(fileno=descriptor)).run(loader)


if __name__ == "__main__":
    sys.exit(run_process(int(sys.argv[1])))
