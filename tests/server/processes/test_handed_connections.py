"""How an API process takes the connections that it is handed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from realizar.server.processes.main import _Served
from realizar.server.processes.messages import ConnectionsClosed, FromProcess


class Link:
    """The side of the main process: what it was sent."""

    def __init__(self) -> None:
        self.got: list[FromProcess] = []

    def report(self, message: FromProcess) -> None:
        self.got.append(message)


def test_a_connection_without_a_free_descriptor_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    """The system passes the byte on without the descriptor then, as if it had been sent alone."""

    async def main() -> list[FromProcess]:
        served, link = _Served.__new__(_Served), Link()
        served._link, served._num_closed = link, 0  # type: ignore[assignment]
        sender, handing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with sender, handing:
            handing.setblocking(False)
            for _ in range(2):
                sender.send(b"c")
            served._enter(handing)
            await asyncio.sleep(0)
        return link.got

    assert asyncio.run(main()) == [ConnectionsClosed(2)]
    assert caplog.text.count("no more open files") == 2
