"""A client that leaves: whatever runs for it is cancelled, so that the engine frees its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was ready; nobody reads what is sent."""


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result.

    Raises:
        ClientDisconnectedError: the client left first; the work has been cancelled, and has ended.
    """
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)
        del task  # or an error, its traceback and this frame would hold each other, and the request
