"""`EngineLink` connects an `AsyncEngine` to an engine.

`ThreadLink` runs the engine on a thread of this process, `InlineLink` on the event loop itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol

from realizar.backends.load_progress import LoadProgress
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.process.loop import SAVE_S, EngineLoop, death_of, describe
from realizar.engine.process.messages import (
    Command,
    EngineLost,
    Event,
    Failed,
    Loading,
    Ping,
    Pong,
    Ready,
    Shutdown,
)
from realizar.errors import DeviceLostError, EngineDeadError
from realizar.ipc.error_records import record_error

_ANEW = "close this LLM and make a new one"
_IN_A_NEW_PROCESS = "no model can run on that GPU in this process any more: make a new LLM in a new process"


class LinkListener(Protocol):
    """Receives the link's callbacks, on the event loop's thread."""

    @property
    def may_be_to_blame(self) -> bool:
        """True if the engine may have died of a request that it has, or just had."""

    def handle(self, event: Event) -> None:
        """Called with every event of the engine; in place of `Failed` comes `EngineLost`."""


class EngineLink(Protocol):
    async def start(self, listener: LinkListener) -> None:
        """Start the engine; returns before it is ready."""

    def send(self, command: Command) -> None:
        """Pass a command on without waiting. The command is lost if no engine runs."""

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine, after the running step or `at_once`; idempotent."""


class ThreadLink:
    """An engine on a thread of this process, on which `load` makes the core: for tests and embedded servers."""

    def __init__(self, load: Callable[[LoadProgress], EngineCore]) -> None:
        self._load = load
        self._engine = EngineLoop(self._report)
        self._thread = threading.Thread(target=self._run, name="realizar-engine", daemon=True)
        self._listener: LinkListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def start(self, listener: LinkListener) -> None:
        self._listener, self._loop = listener, asyncio.get_running_loop()
        self._thread.start()

    def send(self, command: Command) -> None:
        if isinstance(command, Ping):
            self._report(Pong(self._engine.step_age_s))
        else:
            self._engine.post(command)

    async def close(self, *, at_once: bool = False) -> None:
        """A thread can't be stopped, so this always waits for the running step."""
        self._closed = True
        self._engine.post(Shutdown())
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        self._engine.run(lambda: self._load(lambda what, share: self._report(Loading(what, share))))

    def _report(self, event: Event) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, event)

    def _deliver(self, event: Event) -> None:
        if self._listener is None or self._closed:
            return
        self._listener.handle(EngineLost(event.error, restarting=False) if isinstance(event, Failed) else event)


class InlineLink(EngineLoop):
    """An engine whose steps run on an event loop that is there for it alone; `close` closes `core`.

    Commands are executed as they are sent, so that all that is sent between two steps is in the next one.
    """

    def __init__(self, core: EngineCore) -> None:
        super().__init__(self._deliver)
        self._core = core
        self._listener: LinkListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._step_is_due = False

    async def start(self, listener: LinkListener) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._listener = listener

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._do, self._core.check_backend)  # after which there are steps

        self._core.watch(wake)
        self._deliver(Ready(describe(self._core)))

    def send(self, command: Command) -> None:
        self._do(lambda: self.handle(self._core, command))

    def post(self, command: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._do, lambda: self.handle(self._core, command))

    async def close(self, *, at_once: bool = False) -> None:
        self._core.close()

    def _do(self, work: Callable[[], None]) -> None:
        """Do a part of the engine's work, and have a step follow while there is more."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the waiting clients must learn of any error
            death = death_of(error)
            is_gpu_lost = isinstance(death.__cause__, DeviceLostError) and self._core.config.chosen.kind == "cuda"
            anew = _IN_A_NEW_PROCESS if is_gpu_lost else _ANEW
            self._deliver(EngineLost(record_error(EngineDeadError(f"{death}; {anew}")), restarting=False))
        else:
            if self._step_is_due or self._loop is None:
                return
            if self._core.has_work:
                self._step_is_due = True
                self._loop.call_soon(self._do, self._next_step)
            elif self._core.save():
                self._step_is_due = True
                self._loop.call_later(SAVE_S, self._do, self._next_step)

    def _next_step(self) -> None:
        self._step_is_due = False
        if self._core.has_work:
            self.step(self._core)

    def _deliver(self, event: Event) -> None:
        if self._listener is not None:
            self._listener.handle(event)


def closed_error() -> EngineDeadError:
    return EngineDeadError("the engine was closed")
