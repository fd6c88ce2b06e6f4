"""A real server over a scripted engine, for tests in which bytes, headers and connections matter."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Self, cast

import uvicorn

from realizar.server.app import create_app
from realizar.server.http.listen import uvicorn_config
from realizar.server.settings import ServerSettings
from scripted_api import cut_off, start_serving
from server.scripted_engine import ScriptedEngine, scripted_model
from waits import HANG_S

SETTINGS = ServerSettings(log_requests=False)


class Door:
    """A server with a scripted engine behind it, on the loop of the test. Attributes: app, port."""

    def __init__(self, settings: ServerSettings, **engine: Any) -> None:
        self.app = app = create_app(cast("Any", ScriptedEngine(**engine)), scripted_model(), settings)
        self._writers: list[asyncio.StreamWriter] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn_config(app, settings, timeout_graceful_shutdown=1))

    async def __aenter__(self) -> Self:
        self._serving = await start_serving(self._server, self._listener)
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
        await cut_off(self._server, self._serving)

    async def end(self) -> None:
        """End when all connections have closed, however long it takes them."""
        self._server.config.timeout_graceful_shutdown = None
        self._server.should_exit = True
        await self._serving

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is closed with the door."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    def connections(self) -> list[Any]:
        """The protocols of open connections."""
        return list(self._server.server_state.connections)

    async def exchange(self, sent: bytes) -> bytes:
        """All that is answered until the server closes the connection."""
        reader, writer = await self.connect()
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        return answer


def at_the_door(
    main: Callable[[Door], Coroutine[Any, Any, None]], settings: ServerSettings = SETTINGS, **engine: Any
) -> None:
    async def run() -> None:
        async with Door(settings, **engine) as door:
            await asyncio.wait_for(main(door), HANG_S)

    asyncio.run(run())
