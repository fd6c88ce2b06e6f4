"""Client disconnects: the work for a disconnected client is cancelled, so that the engine frees its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was ready."""


async def wait_for_disconnect(receive: Receive) -> None:
    """The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Wait for the work's result.

    It raises ClientDisconnectedError if the client disconnected first; the work was cancelled and has ended.
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
        del task  # otherwise an error, its traceback and this frame would keep each other and the request alive
