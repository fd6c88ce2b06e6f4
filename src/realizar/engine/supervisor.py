"""`ProcessLink`: an engine in a process of its own, watched, and replaced when it dies."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress

from realizar.engine.async_link import LinkListener
from realizar.engine.process_child import ChildEnd, EngineChild, Vigilance
from realizar.engine.process_messages import Command, Event, Load, Ready
from realizar.engine.transport import FrameError
from realizar.errors import EngineDeadError, InvalidRequestError, RealizarError

_LOG = logging.getLogger(__name__)
ENGINE_COMMAND = (sys.executable, "-m", "realizar.engine.process")


class ProcessLink:
    """Starts engine processes, one at a time; see `async_link.EngineLink`.

    An engine that says itself why it can't load, before any was ever ready, is not tried again: a broken model does not
    mend. Everything else is a crash.

    Args:
        load: the model and how to run it.
        vigilance: when to give up on an engine, and on engines.
        command: what to start; the descriptor of its socket is appended.
    """

    def __init__(self, load: Load, vigilance: Vigilance | None = None, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._load = load
        self._vigilance = vigilance or Vigilance()
        self._command = tuple(command)
        self._child: EngineChild | None = None
        self._task: asyncio.Task[None] | None = None
        self._was_ready = False

    async def start(self, listener: LinkListener) -> None:
        """See `EngineLink`."""
        self._task = asyncio.create_task(self._supervise(listener))

    def send(self, command: Command) -> None:
        """See `EngineLink`.

        Raises:
            InvalidRequestError: the command is too large to be sent.
        """
        if self._child is None:
            return
        try:
            self._child.send(command)
        except FrameError as error:
            raise InvalidRequestError(str(error)) from error

    async def close(self, *, at_once: bool = False) -> None:
        """See `EngineLink`."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        child, self._child = self._child, None
        if child is not None:
            await child.stop(0.0 if at_once else self._vigilance.shutdown_s)

    async def _supervise(self, listener: LinkListener) -> None:
        crashes = 0
        while True:
            end = await self._run_one(listener)
            steady = end.ready_s is not None and end.ready_s >= self._vigilance.steady_s
            crashes = 1 if steady else crashes + 1
            error: RealizarError | None = None
            if end.reported and not self._was_ready:
                error = end.error
            elif crashes >= self._vigilance.max_crashes:
                error = EngineDeadError(f"the engine died {crashes} times in a row, the last time so: {end.error}")
            if error is not None:
                listener.lost(error, restarting=False)
            else:
                delay_s = min(self._vigilance.first_delay_s * 2 ** (crashes - 1), self._vigilance.longest_delay_s)
                _LOG.error("%s; another one is started in %.2g s", end.error, delay_s)
                listener.lost(end.error, restarting=True)
            if self._child is not None:
                await self._child.reap()
            self._child = None
            if error is not None:
                return
            await asyncio.sleep(delay_s)

    async def _run_one(self, listener: LinkListener) -> ChildEnd:
        """Start one engine and watch it to its end."""

        def note(event: Event) -> None:
            if isinstance(event, Ready):
                if self._was_ready:
                    _LOG.warning("the engine is ready again")
                self._was_ready = True
            listener.handle(event)

        child = self._child = EngineChild(note)
        try:
            await child.start(self._command)
        except OSError as error:
            return ChildEnd(EngineDeadError(f"no engine process could be started: {error}"), False, None)
        self.send(self._load)
        return await child.watch(self._vigilance)
