"""An API process: it serves the connections that the main process hands over, and reaches the engine through it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import LinkListener
from realizar.engine.frontend.questions import Questions, send_reply
from realizar.engine.frontend.tasks import Tasks
from realizar.engine.loading import find_checkpoint
from realizar.engine.process.messages import Abort, Add, Ask, Command, Ping, Pong, Question, Reply
from realizar.errors import InvalidRequestError
from realizar.ipc.frames import FrameError, FrameReader, encode_frame
from realizar.server.app import create_app
from realizar.server.figures import ServerFigures
from realizar.server.http.listen import uvicorn_config
from realizar.server.http.memory_return import keep_little_memory
from realizar.server.http.protocol import bounded_protocol
from realizar.server.metrics import Metrics, MetricSamples
from realizar.server.processes.messages import (
    ConnectionsClosed,
    Drain,
    FromProcess,
    Start,
    Started,
    Stop,
    ToProcess,
)
from realizar.server.run import LAST_ANSWERS_S, SWITCH_INTERVAL_S, QuietServer
from realizar.server.served_model import ServedModel, make_served_model
from realizar.server.settings import ServerSettings

_LOG = logging.getLogger(__name__)
_RECEIVE_BYTES = 1 << 18
_HANDED_AT_ONCE = 16


def receive_start(messages: socket.socket) -> tuple[Start, FrameReader[ToProcess]]:
    """Read the first message; the reader has what came after it. It raises EOFError if the main process is gone."""
    reader: FrameReader[ToProcess] = FrameReader(ToProcess)
    while data := messages.recv(_RECEIVE_BYTES):
        reader.add(data)
        if (first := reader.take()) is not None:
            if not isinstance(first, Start):
                raise EOFError(f"the first message is {type(first).__name__}")
            return first, reader
    raise EOFError("the main process is gone")


def model_of_start(start: Start) -> ServedModel:
    return make_served_model(
        find_checkpoint(start.model), start.names, start.context_length, start.sampling, start.chat_template,
        created_s=start.created_s, config=start.config,
    )  # fmt: skip


def run_api_process(
    messages: socket.socket, handing: socket.socket, start: Start, reader: FrameReader[ToProcess]
) -> None:
    """Serve until the main process says stop, or is gone. `reader` is that of `messages`."""
    keep_little_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    served = _Served(start, model_of_start(start), reader)
    with asyncio.Runner(loop_factory=served.config.get_loop_factory()) as runner:
        runner.run(served.run(messages, handing))


class _Served:
    def __init__(self, start: Start, model: ServedModel, reader: FrameReader[ToProcess]) -> None:
        self._link = _HubLink(reader, self._stop)
        self._engine = model.engine(self._link, start.max_queued, start.pooling)
        app = create_app(self._engine, model, start.settings, self._link.exposition)
        metrics: Metrics = app.state.models.api.metrics
        figures: ServerFigures = app.state.figures
        self._link.samples = lambda: (*metrics.samples(), *figures.samples())
        self._num_closed = 0
        self._protocol = self._counted_protocol(start.settings, figures)
        self.config = uvicorn_config(app, start.settings, http=self._protocol, timeout_graceful_shutdown=LAST_ANSWERS_S)
        self._server = QuietServer(self.config)
        self._entering = Tasks()

    async def run(self, messages: socket.socket, handing: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        messages.setblocking(False)
        handing.setblocking(False)
        await loop.create_unix_connection(lambda: self._link, sock=messages)
        serving = asyncio.create_task(self._server.serve(sockets=[]))
        while not self._server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.001)
        await self._engine.start()
        loop.add_reader(handing.fileno(), self._enter, handing)
        self._link.report(Started())
        await serving
        loop.remove_reader(handing.fileno())

    def _stop(self) -> None:
        self._server.should_exit = True

    def _enter(self, handing: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_HANDED_AT_ONCE):
            try:
                data, descriptors, _, _ = socket.recv_fds(handing, 1, 4)
            except (BlockingIOError, InterruptedError):
                return
            if not data and not descriptors:
                loop.remove_reader(handing.fileno())  # the main process is gone
                return
            if not descriptors:  # the system closes those for which the process has no room
                _LOG.error("a connection was dropped, because ulimit -n allows no more open files")
                self._note_closed()
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                self._entering.start(self._connect(connection))

    async def _connect(self, connection: socket.socket) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._new_protocol, connection, ssl=self.config.ssl)
        except OSError:  # it was closed meanwhile, or its handshake failed
            connection.close()
            self._note_closed()

    def _new_protocol(self) -> HttpToolsProtocol:
        server = self._server
        return self._protocol(config=self.config, server_state=server.server_state, app_state=server.lifespan.state)

    def _counted_protocol(self, settings: ServerSettings, figures: ServerFigures) -> type[HttpToolsProtocol]:
        """The protocol of these settings, which reports closed connections."""
        base, note_closed = bounded_protocol(settings, figures.refused), self._note_closed

        def connection_lost(protocol: HttpToolsProtocol, exc: Exception | None) -> None:
            note_closed()
            base.connection_lost(protocol, exc)

        return type("CountedProtocol", (base,), {"connection_lost": connection_lost})

    def _note_closed(self) -> None:
        if not self._num_closed:
            asyncio.get_running_loop().call_soon(self._report_closed)
        self._num_closed += 1

    def _report_closed(self) -> None:
        count, self._num_closed = self._num_closed, 0
        self._link.report(ConnectionsClosed(count))


class _HubLink(asyncio.Protocol):
    """An `EngineLink`, and the other messages of the main process. When the main process is gone, this one ends.

    `reader` has read the first message, and maybe others, which are taken at the start.
    """

    def __init__(self, reader: FrameReader[ToProcess], stop: Callable[[], None]) -> None:
        self._reader, self._stop = reader, stop
        self._listener: LinkListener | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._asked = Questions(self.report)
        self._tasks = Tasks()
        self.samples: Callable[[], tuple[MetricSamples, ...]] = tuple

    async def start(self, listener: LinkListener) -> None:
        """The connection must be made."""
        self._listener = listener
        self.data_received(b"")

    def send(self, command: Command) -> None:
        """It raises InvalidRequestError if the command is too large to be sent."""
        if isinstance(command, Add | Abort | Ask):
            try:
                self.report(command)
            except FrameError as error:
                raise InvalidRequestError(str(error)) from error

    def report(self, message: FromProcess) -> None:
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    async def close(self, *, at_once: bool = False) -> None:
        """The engine is the main process's."""

    async def exposition(self) -> bytes:
        text: bytes = await self._asked.ask("exposition")
        return text

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._reader.add(data)
        while self._listener is not None and (message := self._reader.take()) is not None:
            self._take(self._listener, message)

    def connection_lost(self, error: Exception | None) -> None:
        os._exit(1)

    def _take(self, listener: LinkListener, message: ToProcess) -> None:
        match message:
            case Drain():
                if isinstance(listener, AsyncEngine):
                    self._tasks.start(listener.drain())
            case Stop():
                self._stop()
            case Ask():
                self._tasks.start(send_reply(message, self._asked_for(message.what), self.report))
            case Ping():
                self.report(Pong())
            case Reply():
                self._asked.resolve(message)
                listener.handle(Reply(message.number, error=message.error))
            case Start():
                raise FrameError("a second start")
            case _:
                listener.handle(message)

    async def _asked_for(self, what: Question) -> tuple[MetricSamples, ...]:
        if what != "samples":
            raise InvalidRequestError(f"an API process has no {what}")
        return self.samples()
