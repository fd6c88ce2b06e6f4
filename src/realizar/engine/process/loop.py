"""`EngineLoop` drives an `EngineCore` by commands from another thread, and reports events."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeAlias

from realizar.backends.base import Transfer
from realizar.backends.machine import resident_bytes
from realizar.engine.core.disk_cache import Batch, Fetch
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    CachedKeys,
    Command,
    EngineInfo,
    Event,
    Failed,
    Outputs,
    PromptRead,
    Question,
    Ready,
    Refused,
    Reply,
    Shutdown,
    WatchKeys,
)
from realizar.engine.stats import EngineStats
from realizar.errors import (
    CapacityError,
    CaptureLostError,
    DeviceLostError,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    RealizarError,
)
from realizar.ipc.error_records import record_error
from realizar.outputs import PromptProgress
from realizar.request import Request
from realizar.step_deltas import StepDeltas

_LOG = logging.getLogger(__name__)
_KEYS_S = 0.05  # between reports of the prefix cache, while there is work
SAVE_S = 0.01
"""Seconds without work between copies of blocks that are to be saved, or graphs that are to be captured."""
_IDLE_S = 1.0  # after so long without work, the block audit is run


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request that waited, with what it waited for, or why it is refused.

    `fetches`: files may still have more of its prompt than the cache.
    """

    add: Add
    request: Request | RealizarError
    fetches: bool


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A part of what files have of a request's prompt, or None behind the last one."""

    add: Add
    fetch: Fetch
    batch: Batch | None


_Command: TypeAlias = Command | _Prepared | _Fetched


class EngineLoop:
    """The step loop with an inbox, read between steps. `report` gets every event, on the thread that runs the loop."""

    def __init__(self, report: Callable[[Event], None]) -> None:
        self._report = report
        self._inbox: deque[_Command] = deque()
        self._news = threading.Condition()
        self._step_started_s: float | None = None
        self._num_steps = self._num_audited_steps = 0
        self._step_s = 0.0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prompts: dict[str, int] = {}
        self._progress: dict[str, PromptProgress | None] = {}  # as last reported, until the prompt is read
        self._keys_reported_s = 0.0
        self._unsent: list[int] = []  # numbers of choices of the last step that could not be sent
        self._preparing: dict[str, tuple[Add, Callable[[], None]]] = {}  # and what cancels that, by id
        self._fetching: dict[str, tuple[Add, Fetch]] = {}

    def post(self, command: _Command) -> None:
        """Put a command into the inbox without waiting. Any thread may call this."""
        with self._news:
            self._inbox.append(command)
            self._news.notify()

    def _wake(self) -> None:
        with self._news:
            self._news.notify()

    def abort_unsent(self, number: int) -> None:
        """End a request whose deltas of this step can't be sent; `report` may call it while it has the deltas."""
        self._unsent.append(number)

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began; 0 between steps. Any thread may read this."""
        started_s = self._step_started_s
        return 0.0 if started_s is None else time.monotonic() - started_s

    def run(self, load: Callable[[], EngineCore]) -> None:
        """Load, then execute commands until a shutdown or until the engine stops. Errors become `Failed` events."""
        try:
            core = load()
        except Exception as error:  # noqa: BLE001 - the waiting clients must learn of any error
            if isinstance(error, MemoryError):
                error = CapacityError(f"the machine's memory did not suffice while the model was loaded: {error}")
            elif not isinstance(error, RealizarError):
                _LOG.exception("loading failed")
            self._report(Failed(record_error(error)))
            return
        core.watch(self._wake)
        try:
            self._report(Ready(describe(core)))
            self._obey(core)
        except Exception as error:  # noqa: BLE001 - as above
            self._report(Failed(record_error(death_of(error))))
        finally:
            core.close()

    def _obey(self, core: EngineCore) -> None:
        while True:
            for command in self._next_commands(core):
                if isinstance(command, Shutdown):
                    return
                self.handle(core, command)
            if core.has_work:
                self.step(core)

    def _next_commands(self, core: EngineCore) -> list[_Command]:
        """Take the commands from the inbox, waiting if there is no work. Each idle time runs the block audit once."""
        while True:
            audited = self._num_audited_steps == self._num_steps
            saves = prepares = False
            if not core.has_work:
                self._report_keys(core)
                saves = core.save()
                prepares = not self._inbox and core.prepare()
            with self._news:
                core.check_backend()  # here, so that no end of it is missed between a look and the wait
                if not self._inbox and not core.has_work:
                    self._news.wait(SAVE_S if saves or prepares else None if audited else _IDLE_S)
                if (saves or prepares) and not self._inbox:
                    continue
                if self._inbox or core.has_work or audited:
                    commands = list(self._inbox)
                    self._inbox.clear()
                    return commands
            self._num_audited_steps = self._num_steps
            if (fault := _audit(core)) is not None:
                _LOG.critical("the block audit found a fault: %s", fault)

    def step(self, core: EngineCore) -> None:
        started_s = self._step_started_s = time.monotonic()
        deltas = core.step()
        self._step_started_s = None
        self._step_s += time.monotonic() - started_s
        self._num_steps += 1
        if self._progress:
            self._report_progress(core, deltas)
        if deltas:
            self._count(deltas)
            self._report(Outputs(deltas))
            unsent, self._unsent = [core.scheduler.request_of(number) for number in self._unsent], []
            for request_id in unsent:
                if request_id is not None:
                    self._abort(core, request_id)
        if time.monotonic() - self._keys_reported_s >= _KEYS_S:
            self._report_keys(core)

    def _report_keys(self, core: EngineCore) -> None:
        changes = core.cache.take_key_changes()
        if changes is not None:
            self._keys_reported_s = time.monotonic()
            self._report(CachedKeys(changes))

    def _report_progress(self, core: EngineCore, deltas: StepDeltas) -> None:
        """Report how much has been read of the prompts of requests that want to know, where it is more than before."""
        failed = {failure.number for failure in deltas.failures}
        started = {start.request_id: start for start in deltas.starts if start.number not in failed}
        for request_id, reported in list(self._progress.items()):
            progress = core.scheduler.prompt_progress(request_id)
            if progress is None and (start := started.get(request_id)) is not None:  # its only step ended it
                total = self._prompts.get(request_id, 0)
                progress = PromptProgress(total, start.num_cached_tokens, total)
            if progress is not None and progress != reported:
                self._progress[request_id] = progress
                self._report(PromptRead(request_id, progress))
            if progress is None or progress.num_read == progress.num_tokens:
                del self._progress[request_id]

    def _count(self, deltas: StepDeltas) -> None:
        self._generation_tokens += deltas.num_tokens
        for start in deltas.starts:
            self._prompt_tokens += self._prompts.pop(start.request_id, 0)

    def _compile(self, core: EngineCore, command: Add) -> None:
        request = command.request
        cancel = core.grammars.prepare_later(
            request, lambda error: self.post(_Prepared(command, error or request, fetches=False))
        )
        self._preparing[request.request_id] = command, cancel

    def _encode(self, core: EngineCore, command: Add) -> None:
        request = command.request
        cancel = core.embed_later(request, lambda done: self.post(_Prepared(command, done, fetches=True)))
        self._preparing[request.request_id] = command, cancel

    def _fetch(self, core: EngineCore, command: Add) -> bool:
        """True where files are read first, that have more of a request's prompt than the cache."""
        started = core.fetch(command.request, lambda fetch, batch: self.post(_Fetched(command, fetch, batch)))
        if started is not None:
            self._fetching[command.request.request_id] = command, started
        return started is not None

    def _take_fetched(self, core: EngineCore, fetched: _Fetched) -> None:
        core.take_in(fetched.fetch, fetched.batch)
        request_id = fetched.add.request.request_id
        add, _ = self._fetching.get(request_id, (None, None))
        if fetched.batch is None and add is fetched.add:  # else it was aborted meanwhile
            del self._fetching[request_id]
            self._add(core, add, fetches=False)

    def _add(self, core: EngineCore, command: Add, *, fetches: bool = True) -> None:
        request = command.request
        try:
            if request.shows_pictures:
                self._encode(core, command)
                return
            if fetches and self._fetch(core, command):
                return
            if not core.acquire_grammar(request):
                self._compile(core, command)
                return
            core.add(request)
        except Exception as error:  # one request's failure must not affect the others
            if _ends_the_engine(error):
                raise
            if not isinstance(error, RealizarError):
                _LOG.exception("%s could not be queued", request.request_id)
            self._report(Refused(request.request_id, record_error(error)))
            return
        self._prompts[request.request_id] = request.num_prompt_tokens
        if request.reports_progress:
            self._progress[request.request_id] = None
        self._report(Accepted(request.request_id))

    def handle(self, core: EngineCore, command: _Command) -> None:
        if isinstance(command, _Prepared):
            self._take_prepared(core, command)
        elif isinstance(command, _Fetched):
            self._take_fetched(core, command)
        elif isinstance(command, Add):
            self._add(core, command)
        elif isinstance(command, Abort):
            self._abort(core, command.request_id, command.choice)
        elif isinstance(command, Ask):
            self._report(self._reply(core, command))
        elif isinstance(command, WatchKeys):
            core.cache.watch_keys()
            self._report_keys(core)

    def _abort(self, core: EngineCore, request_id: str, choice: int | None = None) -> None:
        core.abort(request_id, choice)
        if choice is None:
            self._progress.pop(request_id, None)
            self._prompts.pop(request_id, None)
            _, cancel = self._preparing.pop(request_id, (None, None))
            if cancel is not None:
                cancel()
            _, fetch = self._fetching.pop(request_id, (None, None))
            if fetch is not None:
                fetch.is_cancelled = True

    def _take_prepared(self, core: EngineCore, prepared: _Prepared) -> None:
        request_id = prepared.add.request.request_id
        add, _ = self._preparing.get(request_id, (None, None))
        if add is not prepared.add:
            return  # it was aborted meanwhile
        del self._preparing[request_id]
        if isinstance(prepared.request, RealizarError):
            if _ends_the_engine(prepared.request):
                raise prepared.request
            self._report(Refused(request_id, record_error(prepared.request)))
        else:
            self._add(core, Add(prepared.request), fetches=prepared.fetches)

    def _reply(self, core: EngineCore, ask: Ask) -> Reply[EngineStats | Transfer | str]:
        """An error that leaves the engine as it was is part of the reply."""
        replies: dict[Question, Callable[[], EngineStats | Transfer | str | None]] = {
            "stats": lambda: self._stats(core),
            "audit": lambda: _audit(core),
            "clear_cache": core.clear_cache,
            "sleep": core.sleep,
            "wake": core.wake,
        }
        try:
            if ask.what not in replies:
                raise InvalidRequestError(f"an engine has no {ask.what}")
            return Reply(ask.number, replies[ask.what]())
        except RealizarError as error:
            if _ends_the_engine(error):
                raise
            return Reply(ask.number, error=record_error(error))

    def _stats(self, core: EngineCore) -> EngineStats:
        blocks, memory = core.cache.counts, core.device_memory
        snapshots, counts = core.cache.snapshots.counts, asdict(core.scheduler.counts)
        coming = [*self._fetching.values(), *self._preparing.values()]
        counts["num_waiting"] += sum(add.request.sampling.n for add, _ in coming)
        return EngineStats(
            **counts,
            num_used_blocks=sum(group.used for group in blocks),
            num_blocks=sum(group.total for group in blocks),
            kv_cache_bytes=core.capacity.kv_cache_bytes,
            resident_bytes=resident_bytes(),
            num_snapshots=snapshots.kept,
            snapshots_taken=snapshots.taken,
            snapshots_restored=snapshots.restored,
            snapshots_dropped=snapshots.dropped,
            num_host_snapshots=snapshots.host_kept,
            snapshots_stored=snapshots.stored,
            snapshots_fetched=snapshots.fetched,
            blocks_saved=core.disk_counts.saved,
            blocks_fetched=core.disk_counts.fetched,
            num_steps=self._num_steps,
            step_s=self._step_s,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            device_memory_used_bytes=0 if memory is None else memory.used_bytes,
            device_memory_total_bytes=0 if memory is None else memory.total_bytes,
        )


def _ends_the_engine(error: Exception) -> bool:
    """True for an error after which nothing can run; False where a model is only asleep."""
    return isinstance(error, EngineDeadError | DeviceLostError) and not isinstance(error, EngineUnavailableError)


def death_of(error: Exception) -> RealizarError:
    """What an engine's clients get that an error has ended: an EngineDeadError, or what another engine goes without."""
    if isinstance(error, EngineDeadError | CaptureLostError):
        return error
    _LOG.error("the engine's loop failed", exc_info=error)
    return EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")


def _audit(core: EngineCore) -> str | None:
    try:
        core.audit()
    except RuntimeError as error:
        return str(error)
    return None


def describe(core: EngineCore) -> EngineInfo:
    spec, capacity = core.spec, core.capacity
    return EngineInfo(
        architecture=spec.architecture,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        context_length=core.config.context_length,
        max_request_tokens=core.scheduler.max_request_tokens,
        max_running=core.config.max_running,
        capacity=capacity,
        pid=os.getpid(),
        queue_length=core.config.queue_length,
        threads=core.config.threads,
        cached_block_tokens=capacity.block_size if core.config.prefix_cache else 0,
        device=core.config.chosen.kind,
        device_label=core.config.device_label,
        drafter=core.config.drafter,
    )
