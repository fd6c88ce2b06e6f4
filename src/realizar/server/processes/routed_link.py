"""`RoutedLink`: the link of the main process's `AsyncEngine`, which gets no tokens: they go to the API processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from realizar.engine.clients.async_link import EngineLink
from realizar.engine.clients.link_between import LinkBetween
from realizar.engine.process.messages import Accepted, Event, Loading, Outputs, PromptRead, Ready, RequestsLost
from realizar.errors import RealizarError
from realizar.step_deltas import StepDeltas


class Audience(Protocol):
    """Receives what concerns the API processes."""

    def take_deltas(self, deltas: StepDeltas) -> None:
        """Called with the deltas of a step."""

    def accepted(self, event: Accepted) -> None:
        """Called when the engine has queued a request, before anything else of it."""

    def prompt_read(self, event: PromptRead) -> None:
        """Called when more of a prompt has been read."""

    def requests_lost(self, event: RequestsLost) -> None:
        """Called when some requests are gone with one of several engines."""

    def state_changed(self, event: Ready | Loading) -> None:
        """Called when the engine loads or is ready."""

    def engine_lost(self, error: RealizarError, *, restarting: bool) -> None:
        """Called when the engine is gone."""

    def engine_blocked(self, reason: str) -> None:
        """Called when no engine can be started before the model's files change."""


class NoText:
    """The text of a choice whose tokens are elsewhere, as a `GrowingText`."""

    may_stop = False
    stop_string = None
    marks = ()

    def add(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class RoutedLink(LinkBetween):
    """An `EngineLink` between another one and the engine of the main process.

    Args:
        link: to the engine.
        audience: gets every event before the engine of the main process does.
    """

    def __init__(self, link: EngineLink, audience: Audience) -> None:
        super().__init__(link)
        self._audience = audience

    def handle(self, event: Event) -> None:
        """See `LinkListener`."""
        if isinstance(event, Outputs):
            self._audience.take_deltas(event.deltas)
            event = Outputs(_without_tokens(event.deltas))
        elif isinstance(event, PromptRead):
            self._audience.prompt_read(event)
            return
        elif isinstance(event, Accepted):
            self._audience.accepted(event)
        elif isinstance(event, RequestsLost):
            self._audience.requests_lost(event)
        elif isinstance(event, Ready | Loading):
            self._audience.state_changed(event)
        super().handle(event)

    def lost(self, error: RealizarError, *, restarting: bool, blame: bool = True, counted: bool = False) -> None:
        """See `LinkListener`."""
        self._audience.engine_lost(error, restarting=restarting)
        super().lost(error, restarting=restarting, blame=blame, counted=counted)

    def blocked(self, reason: str) -> None:
        """See `LinkListener`."""
        self._audience.engine_blocked(reason)
        super().blocked(reason)


def _without_tokens(deltas: StepDeltas) -> StepDeltas:
    """The part of a step that counts for all processes together: starts, ends and failures."""
    return StepDeltas(deltas.produced_s, starts=deltas.starts, ends=deltas.ends, failures=deltas.failures)
