"""`HubLink`: the link of an API process's `AsyncEngine`, which reaches the engine through the main process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import cast

from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.clients.async_link import LinkListener
from realizar.engine.clients.async_questions import Questions
from realizar.engine.process.messages import Abort, Add, ClearCache, Command, Ping, Pong, restore_error
from realizar.engine.process.transport import FrameError, FrameReader, encode_frame
from realizar.errors import InvalidRequestError
from realizar.server.metrics import Metrics, MetricSamples
from realizar.server.processes.messages import (
    AskExposition,
    AskSamples,
    Drain,
    EngineBlocked,
    EngineLost,
    Exposition,
    FromProcess,
    Samples,
    Start,
    Stop,
    ToProcess,
)


class HubLink(asyncio.Protocol):
    """An `EngineLink`, and the other messages of the main process. When the main process is gone, this one ends.

    Args:
        reader: has read the first message, and maybe the beginning of others.
        pending: messages that came with the first.
        stop: called when the process is to end.
    """

    def __init__(self, reader: FrameReader[ToProcess], pending: list[ToProcess], stop: Callable[[], None]) -> None:
        self._reader, self._pending, self._stop = reader, pending, stop
        self._listener: LinkListener | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._expositions: Questions[bytes] = Questions()
        self._draining: asyncio.Task[None] | None = None
        self.samples: Callable[[], tuple[MetricSamples, ...]] = tuple

    async def start(self, listener: LinkListener) -> None:
        """See `EngineLink`. The connection must be made."""
        self._listener = listener
        for message in self._pending:
            self._take(message)
        self._pending.clear()

    def send(self, command: Command) -> None:
        """See `EngineLink`.

        Raises:
            InvalidRequestError: the command is too large to be sent.
        """
        if isinstance(command, Add | Abort | ClearCache):
            try:
                self.report(command)
            except FrameError as error:
                raise InvalidRequestError(str(error)) from error

    def report(self, message: FromProcess) -> None:
        """Send a message to the main process."""
        if self._transport is not None:
            self._transport.write(encode_frame(message))

    async def close(self, *, at_once: bool = False) -> None:
        """See `EngineLink`: the engine is the main process's."""

    async def exposition(self, metrics: Metrics) -> bytes:
        """The metrics of the whole server."""
        ticket, answer = self._expositions.ask()
        self.report(AskExposition(ticket))
        return await answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop with received bytes."""
        for message in self._reader.feed(data):
            if self._listener is None:
                self._pending.append(message)
            else:
                self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop when the main process is gone."""
        os._exit(1)

    def _take(self, message: ToProcess) -> None:
        listener = self._listener
        if listener is None:
            return
        match message:
            case EngineLost():  # the main process knows whom to blame
                listener.lost(restore_error(message.error), restarting=message.restarting, blame=False)
            case EngineBlocked(reason):
                listener.blocked(reason)
            case Drain():
                if isinstance(listener, AsyncEngine):
                    self._draining = asyncio.create_task(listener.drain())
            case Stop():
                self._stop()
            case AskSamples(ticket):
                self.report(Samples(ticket, self.samples()))
            case Ping(ticket):
                self.report(Pong(ticket))
            case Exposition(ticket, text):
                self._expositions.answer(ticket, text)
            case Start():
                raise FrameError("a second start")
            case _:
                listener.handle(message)
