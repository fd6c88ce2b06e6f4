"""`LinkBetween`: an `EngineLink` on top of another one, which passes on what its subclass does not take."""

from __future__ import annotations

from realizar.engine.clients.async_link import EngineLink, LinkListener
from realizar.engine.process.messages import Command, Event
from realizar.errors import RealizarError


class LinkBetween:
    """An `EngineLink`, and the listener of the one below it.

    Args:
        link: to the engine.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link
        self._listener: LinkListener | None = None

    async def start(self, listener: LinkListener) -> None:
        """See `EngineLink`."""
        self._listener = listener
        await self._link.start(self)

    def send(self, command: Command) -> None:
        """See `EngineLink`."""
        self._link.send(command)

    async def close(self, *, at_once: bool = False) -> None:
        """See `EngineLink`."""
        await self._link.close(at_once=at_once)

    @property
    def may_be_to_blame(self) -> bool:
        """See `LinkListener`."""
        return self._listener is not None and self._listener.may_be_to_blame

    def handle(self, event: Event) -> None:
        """See `LinkListener`."""
        if self._listener is not None:
            self._listener.handle(event)

    def lost(self, error: RealizarError, *, restarting: bool, blame: bool = True, counted: bool = False) -> None:
        """See `LinkListener`."""
        if self._listener is not None:
            self._listener.lost(error, restarting=restarting, blame=blame, counted=counted)

    def blocked(self, reason: str) -> None:
        """See `LinkListener`."""
        if self._listener is not None:
            self._listener.blocked(reason)
