"""`ProcessLink` runs the engine in a process of its own, watches it, and replaces it when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from realizar.checkpoint.model_files import ModelFiles
from realizar.engine.frontend.async_link import LinkListener
from realizar.engine.process.begun import ENGINE_COMMAND, BegunEngine
from realizar.engine.process.child import ChildEnd, EngineChild, LivenessPolicy, growing_pause_s
from realizar.engine.process.messages import (
    Ask,
    Command,
    EngineBlocked,
    EngineLost,
    Event,
    Load,
    Ready,
)
from realizar.errors import CaptureLostError, DeviceLostError, EngineDeadError, InvalidRequestError, RealizarError
from realizar.ipc.error_records import record_error
from realizar.ipc.frames import FrameError

_LOG = logging.getLogger(__name__)


class ProcessLink:
    """Starts engine processes, one at a time; see `async_link.EngineLink`.

    If the first engine reports that it can't load, no other engine is started, because a broken model stays broken.
    After an engine was once ready, such a report is a fault of the model's files: another engine is started when they
    change, or after a delay. Every other end is a crash, and so is a device, or a rank, that is lost in a load. Crashes
    while requests are open, or were just aborted, are attributed to these requests and never end the server. Several
    other crashes in a row end it. An engine that ends asleep is not replaced: another one would take memory that others
    have by now. One whose device is lost while graphs are captured is followed by one without graphs.

    Args:
        command: the command to start; the descriptor of its socket is appended.
        files: the model's files, if they are known.
        label: begins the engine's lines in the log; with the model's name where there are several.
        begun: the first engine's process, which has its load.
    """

    def __init__(
        self,
        load: Load,
        liveness: LivenessPolicy | None = None,
        command: Sequence[str] = ENGINE_COMMAND,
        files: ModelFiles | None = None,
        label: str = "engine",
        begun: BegunEngine | None = None,
    ) -> None:
        self._begun = begun
        self._load, self._files, self._label = load, files, label
        self._liveness = liveness or LivenessPolicy()
        self._command = tuple(command)
        self._child: EngineChild | None = None
        self._task: asyncio.Task[None] | None = None
        self._was_ready = self._is_asleep = False
        self._prefix = "" if label == "engine" else f"{label}: "

    async def start(self, listener: LinkListener) -> None:
        self._task = asyncio.create_task(self._supervise(listener))

    def send(self, command: Command) -> None:
        """It raises InvalidRequestError if the command is too large to be sent."""
        if isinstance(command, Ask) and command.what in ("sleep", "wake"):
            self._is_asleep = command.what == "sleep"
        if self._child is None:
            return
        try:
            self._child.send(command)
        except FrameError as error:
            raise InvalidRequestError(str(error)) from error

    async def close(self, *, at_once: bool = False) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        child, self._child = self._child, None
        if child is not None:
            await child.stop(0.0 if at_once else self._liveness.shutdown_s)

    async def _supervise(self, listener: LinkListener) -> None:
        crashes = deaths = 0
        while True:
            before = None if self._files is None else self._files.signature()
            end = await self._run_one(listener)
            if await self._goes_without_graphs(end):
                continue
            touched = self._files is not None and self._files.signature() != before
            fault = await self._fault(end) if self._was_ready else None
            if end.ready_s is not None and end.ready_s >= self._liveness.steady_s:
                crashes = deaths = 0
            deaths += 1
            crashes += not listener.may_be_to_blame and fault is None
            error: RealizarError | None = None
            if (_is_of_model(end) and not self._was_ready) or self._is_asleep:
                error = end.error
            elif crashes >= self._liveness.max_crashes:
                error = _given_up(crashes, end.error)
            delay_s = growing_pause_s(deaths, self._liveness.first_delay_s, self._liveness.longest_delay_s)
            if error is None:
                _LOG.error("%s%s; another engine is started %s", self._prefix, end.error, _when(delay_s, fault))
            record, blame = record_error(error or end.error), not touched and fault is None
            listener.handle(EngineLost(record, restarting=error is None, blame=blame))
            if self._child is not None:
                await self._child.reap()
            self._child = None
            if error is not None:
                return
            if fault is None:
                await asyncio.sleep(delay_s)
                fault = await self._file_fault()
            if fault is not None:
                await self._wait_for_files(listener, fault, delay_s)

    async def _goes_without_graphs(self, end: ChildEnd) -> bool:
        """True if an engine was lost in capturing graphs: the next one, and all after it, have none."""
        config = self._load.config
        if not isinstance(end.error, CaptureLostError) or not config.graphs:
            return False
        _LOG.warning("%s%s; another engine is started without graphs", self._prefix, end.error)
        self._load = msgspec.structs.replace(self._load, config=replace(config, graphs=False))
        if self._child is not None:
            await self._child.reap()
        return True

    async def _file_fault(self) -> str | None:
        """The check runs on a thread, as file systems may be slow."""
        return None if self._files is None else await asyncio.to_thread(self._files.fault)

    async def _fault(self, end: ChildEnd) -> str | None:
        """The reason why another engine could not start now: a fault of the files, or the error of loading them."""
        found = await self._file_fault()
        if found is None and _is_of_model(end):
            found = str(end.error) if self._files is None else self._files.shown(str(end.error))
        return found

    async def _wait_for_files(self, listener: LinkListener, fault: str, delay_s: float) -> None:
        """Wait until the model's files have no visible fault, and have changed or `delay_s` is over."""
        listener.handle(EngineBlocked(fault))
        _LOG.error("%sno engine is started while the model's files have this fault: %s", self._prefix, fault)
        if self._files is None:
            await asyncio.sleep(delay_s)
            return
        before = self._files.signature()
        until_s = time.monotonic() + delay_s
        while True:
            await asyncio.sleep(self._liveness.file_poll_s)
            changed = self._files.signature() != before
            seen = await self._file_fault()
            if seen is None and (changed or time.monotonic() >= until_s):
                return
            if seen is not None and seen != fault:
                fault = seen
                listener.handle(EngineBlocked(fault))

    async def _run_one(self, listener: LinkListener) -> ChildEnd:
        def note(event: Event) -> None:
            if isinstance(event, Ready):
                if self._was_ready:
                    _LOG.warning("%sthe engine is ready again", self._prefix)
                self._was_ready = True
            listener.handle(event)

        child = self._child = EngineChild(note, self._liveness, self._label)
        begun, self._begun = self._begun, None
        try:
            await (child.start(self._command, self._load) if begun is None else child.take_over(begun))
        except OSError as error:
            return ChildEnd(EngineDeadError(f"no engine process could be started: {error}"), False, None)
        return await child.watch()


def _is_of_model(end: ChildEnd) -> bool:
    """True if an engine said why it can't load: that a device, or a rank, was lost meanwhile is no such reason."""
    return end.reported and end.ready_s is None and not isinstance(end.error, DeviceLostError)


def _given_up(crashes: int, last: RealizarError) -> EngineDeadError:
    text = f"the engine died {crashes} times in a row, the last reason: {last}" if crashes > 1 else str(last)
    return EngineDeadError(text)


def _when(delay_s: float, fault: str | None) -> str:
    return f"in {delay_s:.2g} s" if fault is None else "when the model's files are whole"
