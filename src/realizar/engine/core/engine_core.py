"""`EngineCore`: the step loop. Token ids in, token ids out; text is made elsewhere."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

import numpy as np

from realizar.backends.base import (
    Backend,
    CountsExperts,
    DeviceMemory,
    ForwardInput,
    MayBeLost,
    PreparesLater,
    ReadsAside,
    SavesCache,
    Sleeps,
    Step,
    Transfer,
)
from realizar.backends.resolved_config import ResolvedConfig
from realizar.batch import NO_STEP, ScheduledBatch
from realizar.engine.core.disk_cache import Arrived, Batch, DiskCache, DiskCounts, Fetch
from realizar.engine.core.pictures import PictureEncoder
from realizar.engine.core.row_grammars import RowGrammars
from realizar.errors import (
    CapacityError,
    DeviceLostError,
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    RealizarError,
    StepError,
    UnsupportedModelError,
)
from realizar.kv_cache.block_files import BlockFiles
from realizar.kv_cache.manager import KVCacheManager
from realizar.models.spec import ModelSpec
from realizar.outputs import RowError
from realizar.request import Request
from realizar.scheduler.drafts import Drafter, Drafting, PromptLookup
from realizar.scheduler.pace import Pace, Policy
from realizar.scheduler.scheduler import Scheduler
from realizar.step_deltas import StepDeltas
from realizar.structured.workers.service import GrammarService

_LOG = logging.getLogger(__name__)
_STEPS_BETWEEN = 1  # times as long as a graph's capture took, before another one is captured between steps


class EngineCore:
    """Owns scheduler, KV cache and a loaded backend. Not thread-safe: one caller drives it.

    Args:
        backend: loaded; shut down by `close`.
        config: what the backend was loaded with; the backend's own capacity bounds it.
        new_grammars: as `new_service` of `RowGrammars`; what it makes is closed by `close`.
        files: where blocks and snapshots of the cache are kept, of this model on this backend, a `SavesCache`; None
            keeps none.
        pictures: encodes requests' pictures, and is closed by `close`; None takes none.
        drafter: proposes drafts; None looks them up in the sequences themselves, where `config` asks for any.

    Attributes:
        cache, scheduler, grammars: for what callers ask of them; only the engine changes them.

    Raises:
        InvalidRequestError: there is a drafter, and `config.speculative_tokens` is 0.
    """

    def __init__(
        self, backend: Backend, spec: ModelSpec, config: ResolvedConfig, *, policy: Policy | None = None,
        new_grammars: Callable[[], GrammarService] | None = None, drafter: Drafter | None = None,
        files: BlockFiles | None = None, pictures: PictureEncoder | None = None,
    ) -> None:  # fmt: skip
        capacity = backend.capacity()
        self._backend, self.spec, self.config, self.capacity = backend, spec, config, capacity
        self._pictures = pictures
        self._later = backend if isinstance(backend, PreparesLater) else None
        self._prepared_s = 0.0  # when the next graph may be captured between steps
        self._aside = backend if capacity.aside_tokens and isinstance(backend, ReadsAside) else None
        self._in_flight: deque[tuple[ScheduledBatch, Step]] = deque()
        self.grammars = RowGrammars(new_grammars, config.max_running)
        self._failing: dict[int, RowError] = {}  # sequences that end once what was scheduled of them is submitted
        self._death: str | None = None
        self.cache = KVCacheManager(
            [group.window for group in spec.cache_groups()],
            capacity.num_blocks,
            block_size=capacity.block_size,
            num_rows=config.max_running,
            context_length=config.context_length,
            max_step_tokens=config.max_step_tokens,
            prefix_cache=config.prefix_cache,
            has_state=bool(spec.state_layers()),
            num_snapshots=capacity.num_snapshots,
            num_host_snapshots=capacity.num_host_snapshots,
        )
        self._is_asleep = False
        policy, most_drafts = policy or Policy(stretch=config.stretch), config.speculative_tokens
        if drafter is None and most_drafts:
            drafter = PromptLookup(most_drafts, config.prompt_lookup_max, config.prompt_lookup_min)
        self.scheduler = Scheduler(
            self.cache,
            max_queued=config.max_queued,
            policy=policy,
            pace=Pace(policy.stretch, config.tile_tokens, policy.least_step_s, capacity.step_sizes),
            drafting=Drafting(
                drafter,
                most_drafts,
                spec.vocab_size,
                self.cache.num_rows,
                capacity.num_drafts,
                self.grammars.certain_ids,
                measures=policy.measures_drafts,
                spare=capacity.spare_positions,
            ),
            aside_tokens=capacity.aside_tokens,
        )
        self._disk: DiskCache | None = None
        if files is not None:
            assert isinstance(backend, SavesCache)
            self._disk = DiskCache(backend, self.cache, files, self._block_s)

    def _block_s(self) -> float | None:
        token_s = self.scheduler.prompt_token_s
        return None if token_s is None else token_s * self.cache.block_size

    @property
    def disk_counts(self) -> DiskCounts:
        return DiskCounts() if self._disk is None else self._disk.counts

    @property
    def device_memory(self) -> DeviceMemory | None:
        return self._backend.device_memory()

    def forget_experts_read(self) -> None:
        """Begin the count of `experts_read` again, after the steps that are on their way."""
        if isinstance(self._backend, CountsExperts):
            self._backend.forget_experts_read()

    def experts_read(self) -> float | None:
        """Experts that a mixture read in a step, on average since then; None if the backend counts none."""
        return self._backend.experts_read() if isinstance(self._backend, CountsExperts) else None

    @property
    def has_work(self) -> bool:
        """True while any request is open, a step in flight, or a slice of a picture to be launched."""
        return self._death is None and (self.scheduler.has_work or bool(self._in_flight) or self._has_slices)

    @property
    def _has_slices(self) -> bool:
        return self._pictures is not None and self._pictures.slices is not None and self._pictures.slices.has_work

    def watch(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on whichever thread, when pictures are the first work that there is, and when
        `check_backend` raises.
        """
        if self._pictures is not None and self._pictures.slices is not None:
            self._pictures.slices.wake = wake
        if isinstance(self._backend, MayBeLost):
            self._backend.watch(wake)

    def check_backend(self) -> None:
        """EngineDeadError: the backend has come to its end while nothing ran."""
        if self._death is not None or not isinstance(self._backend, MayBeLost):
            return
        try:
            self._backend.check()
        except DeviceLostError as error:
            self._die(f"the engine stopped: {type(error).__name__}: {error}")
            raise EngineDeadError(self._death) from error

    def add(self, request: Request) -> None:
        """Queue a request. Waits for its grammar to be compiled, unless `acquire_grammar` has returned True for it.

        Its pictures are encoded before, by `embed_later`. What files have of its prompt is not read: see `fetch`.

        Raises:
            InvalidRequestError, ContextLengthError, CapacityError: it can't run.
            RequestFailedError: so too, but for a fault that may be the machine's.
            QueueFullError: the queue is full. EngineDeadError: the engine stopped.
        """
        self._check_alive()
        if request.shows_pictures:
            raise InvalidRequestError("pictures are encoded before a request is queued", "prompt")
        _check_embeddings(request, self.spec)
        while not self.acquire_grammar(request):
            self.grammars.prepare(request)
        if self._disk is None:
            self.scheduler.add(request)
        else:
            self.scheduler.add(request, self._disk.keys_of(request), self._disk.num_fetching)

    def embed_later(self, request: Request, on_done: Callable[[Request | RealizarError], None]) -> Callable[[], None]:
        """As `PictureEncoder.embed_later`, of a request that is not queued yet; raises as `add` where it can't run."""
        self._check_alive()
        _check_embeddings(request, self.spec)
        if self._pictures is None:
            raise InvalidRequestError("the engine has no encoder of images", "prompt")
        num_fetching = 0 if self._disk is None else self._disk.num_fetching
        self.scheduler.check(request, num_fetching + self._pictures.num_waiting)
        return self._pictures.embed_later(request, on_done)

    def fetch(self, request: Request, arrived: Arrived) -> Fetch | None:
        """As `DiskCache.fetch`, of a request that is not queued yet. What arrives goes to `take_in`, in its order.

        Raises as `add`, of a request that can't be queued, for which nothing is read.
        """
        self._check_alive()
        if self._disk is None:
            return None
        _check_embeddings(request, self.spec)
        self.scheduler.check(request, self._disk.num_fetching)
        return self._disk.fetch(request, arrived)

    def take_in(self, fetch: Fetch, batch: Batch | None) -> None:
        """As `DiskCache.take_in`; also where the model sleeps meanwhile, which has cancelled what is read."""
        assert self._disk is not None
        self._disk.take_in(fetch, batch)

    def save(self, *, is_idle: bool = True) -> bool:
        """As `DiskCache.save`; False where nothing is saved."""
        return self._disk is not None and self._disk.save(is_idle=is_idle)

    def prepare(self, *, asked: bool = False) -> bool:
        """As `PreparesLater.prepare_next`, while no step is in flight; given up where what fails is not the device."""
        if self._later is None or self._is_asleep:
            return False
        try:
            if self._later.prepare_next(asked=asked):
                return True
        except DeviceLostError:
            raise
        except Exception as error:  # noqa: BLE001 - steps run without
            _LOG.warning("steps run without further graphs: %s", error)
        if not asked:
            self._later = None
        return False

    def acquire_grammar(self, request: Request) -> bool:
        """As `RowGrammars.acquire`. EngineDeadError: the engine stopped."""
        self._check_alive()
        self._close_rows()  # those of requests that have ended keep grammars whose room this one may need
        return self.grammars.acquire(request, self.scheduler.is_open)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one of its choices, without an output; its blocks are free at once."""
        self.scheduler.abort(request_id, choice)

    def step(self) -> StepDeltas:
        """Run one step. Returns what choices gained.

        Whatever one row raises ends its request with an error. A step without enough memory gives way to smaller ones,
        and a request that does not fit alone ends. Where a kernel fails, all requests of the step end. EngineDeadError:
        the backend failed; so does every later call, and every open request is lost.
        """
        self._check_alive()
        try:
            self._step()
            self.save(is_idle=False)
        except Exception as error:
            self._die(f"the engine stopped: {type(error).__name__}: {error}")
            _LOG.exception("a step failed")
            raise EngineDeadError(self._death) from error
        return self.scheduler.take_deltas()

    def audit(self) -> None:
        """Prove that blocks, rows and sequences are all accounted for. It raises RuntimeError if they are not."""
        counts = self.cache.audit()
        self.scheduler.audit()
        if not self.scheduler.has_work and any(group.used for group in counts):
            raise RuntimeError("no sequence is open and KV blocks are in use")

    def clear_cache(self) -> None:
        """Let nothing that was computed by now be found again; open requests keep the blocks that they have."""
        self.cache.forget()
        if self._disk is not None:
            self._disk.clear()

    def sleep(self) -> Transfer:
        """Give the device's memory back; the prefix cache loses what it holds.

        UnsupportedModelError: the model can't sleep. EngineUnavailableError: a request is open, or it is asleep.
        CapacityError, KernelError: the host's memory does not suffice. The model is awake as before.
        """
        self._check_alive()
        self._close_rows()
        backend = self._sleeping()
        if self.has_work:
            raise EngineUnavailableError("the model can't sleep while a request is open", 1.0)
        self.cache.forget()
        if self._disk is not None:
            self._disk.cancel()
        done = backend.sleep()
        self._is_asleep = True
        return done

    def wake(self) -> Transfer:
        """Take the device's memory again.

        UnsupportedModelError: the model can't sleep. EngineUnavailableError: it is not asleep. CapacityError,
        KernelError: the device's memory does not suffice. The model is asleep as before.
        """
        backend = self._sleeping()
        if not self._is_asleep:
            raise EngineUnavailableError("the model is not asleep", 1.0)
        done = backend.wake()
        self._is_asleep = False
        return done

    def _sleeping(self) -> Sleeps:
        if not isinstance(self._backend, Sleeps):
            raise UnsupportedModelError("a model on the CPU can't sleep: its weights are in the host's memory already")
        return self._backend

    def close(self) -> None:
        """Shut the backend down; idempotent. Open and later requests get EngineDeadError."""
        if self._death is None:
            self._die("the engine was closed")
        self.grammars.shutdown()
        if self._disk is not None:
            self._disk.close()
        if self._pictures is not None:
            self._pictures.close()  # which may take seconds on a CPU
        self._backend.shutdown()

    def _step(self) -> None:
        """Schedule a step and submit it behind the one in flight, then take in those that the next one must wait for.

        A step waits for the masks of its grammars until the next is submitted, or its results are read.
        """
        self._close_rows()
        batch = NO_STEP if self._pauses() or self._prepares() else self._open_rows(self.scheduler.schedule())
        try:
            if batch.num_rows:
                self._submit(batch)
            elif not self._in_flight and self.scheduler.has_work:
                raise RuntimeError("nothing can be scheduled and sequences are open")
            for _ in range(self._num_awaited(batch)):
                self._finish_oldest()
            if self._has_slices:
                self._encode(batch)
        except (CapacityError, StepError) as error:
            self._give_up(batch, error)
        self._close_rows()

    def _encode(self, batch: ScheduledBatch) -> None:
        """Launch a slice of a picture behind a step."""
        assert self._pictures is not None
        assert self._pictures.slices is not None
        if not batch.num_rows and self.scheduler.has_work:
            return  # steps in flight are awaited
        seconds = self.scheduler.beside_s(batch, 1 + self._pictures.num_waiting, self._pictures.client)
        if seconds > 0.0:
            self._pictures.slices.go_on(seconds)

    def _pauses(self) -> bool:
        """True if a step in flight is to be awaited before the next is scheduled: beside a chunk streams want no step
        before a time. Without any in flight that time passes here.
        """
        if self._aside is None:
            return False
        self.scheduler.aside.num_running = self._aside.num_aside()
        pause_s = self.scheduler.pause_s()
        if pause_s and not self._in_flight:
            time.sleep(pause_s)
        return bool(pause_s and self._in_flight)

    def _prepares(self) -> bool:
        """True if steps in flight are to be awaited first, as they ask for a graph; without any it is captured here.

        Half of the time at most goes into that, so that streams go on meanwhile; a step without its graph keeps them
        about as long as a capture.
        """
        if self._later is None or not self._later.asks_for_graphs or time.monotonic() < self._prepared_s:
            return False
        if not self._in_flight:
            start_s = time.monotonic()
            self.prepare(asked=True)
            self._prepared_s = time.monotonic() + _STEPS_BETWEEN * (time.monotonic() - start_s)
        return bool(self._in_flight)

    def _open_rows(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Open the step's new rows. Returns the step, which wants no results of rows that can't be opened: the cache
        counts on their tokens, so that their requests end once it is submitted.
        """
        failed: set[int] = set()
        for opened in batch.opened:
            try:
                self._backend.open(opened)
                self.grammars.open(opened)
            except DeviceLostError:
                raise
            except Exception as error:  # noqa: BLE001 - what one row asks for is not the others' trouble
                _LOG.warning("a row could not be opened", exc_info=error)
                failed.add(opened.row)
                self._failing[opened.sequence_id] = RowError.of(error, "sampler")
        return replace(batch, columns=batch.columns.without_results(failed)) if failed else batch

    def _submit(self, batch: ScheduledBatch) -> None:
        """Submit a step; the backend samples the one before, at the latest now."""
        if not self._in_flight:
            self.grammars.start(batch.columns)  # else its rows' last tokens are not known yet
        elif deferred := self._give_masks():
            batch = self.scheduler.computed_again(batch, deferred)
        if self._aside is not None and batch.aside is not None:
            if batch.aside.is_awaited:
                self._aside.await_aside()
            if batch.aside.chunk is not None:
                self._aside.read_aside(build_forward_input(ScheduledBatch(batch.aside.chunk), self.cache))
        self._in_flight.append((batch, self._backend.submit(build_forward_input(batch, self.cache))))
        if self._disk is not None:
            self._disk.submitted()
        self._end_failing()

    def _give_masks(self) -> Collection[int]:
        """Give the oldest step in flight its masks, unless it has them. Returns the rows that sample nothing in it."""
        batch, step = self._in_flight[0]
        deferred = self.grammars.give(step, self._failing)
        if deferred:
            self.scheduler.defer(batch, deferred)
        return deferred or ()

    def _num_awaited(self, batch: ScheduledBatch) -> int:
        """Steps in flight, the last one submitted among them, that must be done before the next is scheduled."""
        if not batch.num_rows:
            return min(len(self._in_flight), 1)  # nothing can be scheduled before the oldest is done
        most = self.config.steps_in_flight - 1
        return len(self._in_flight) - (0 if most and self.scheduler.awaits(batch) else most)

    def _finish_oldest(self) -> None:
        self._give_masks()
        done, step = self._in_flight[0]
        output = step.result()
        self._in_flight.popleft()
        if self._disk is not None:
            self._disk.ended()
        self.grammars.advance(done.columns, output)
        if self._in_flight:  # the sooner, the sooner its masks are there; rows that end now leave a moment later
            self.grammars.start(self._in_flight[0][0].columns)
        self._end_failing()
        self.scheduler.update(done, output)
        self._close_rows()
        if self._in_flight:
            _, following = self._in_flight[0]
            if self.grammars.give(following, self._failing, waits=False) is not None:
                following.sample()  # or the device would wait for it until the next step is submitted

    def _give_up(self, batch: ScheduledBatch, error: CapacityError | StepError) -> None:
        """Give up all steps in flight, and `batch`: a later one may go on from results that are missing."""
        lost = []
        for each, step in self._in_flight:
            lost.append(each)
            with suppress(CapacityError, StepError):
                step.result()  # no row is closed before the backend is done with it
        # A step in flight may have been made anew of this one, with the same rows, as some of them were deferred.
        if batch.num_rows and not any(each.columns.sequence_ids is batch.columns.sequence_ids for each in lost):
            lost.append(batch)
        self._in_flight.clear()
        if self._disk is not None:
            self._disk.ended(all_steps=True)
        self._end_failing()
        self.grammars.drop()
        if isinstance(error, CapacityError):
            _LOG.warning("a step does not fit into memory, smaller ones take its place: %s", error)
            self.scheduler.try_smaller(lost, RowError.of(error, "step"))
        else:
            _LOG.error("a step was given up, and the requests in it: %s", error)
            self.scheduler.lose(lost, RowError.of(error, "step"))

    def _end_failing(self) -> None:
        """End requests of which a row could not be opened, or can't go on; what steps give them is dropped."""
        failing, self._failing = self._failing, {}
        for sequence_id, error in failing.items():
            self.scheduler.fail(sequence_id, error)

    def _close_rows(self) -> None:
        for row in self.scheduler.take_closed_rows():
            self._backend.close(row)
            self.grammars.close(row)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._is_asleep:
            raise EngineUnavailableError("the model is asleep: its weights are in the host's memory", 1.0)

    def _die(self, reason: str) -> None:
        self._death = reason
        self._in_flight.clear()


def _check_embeddings(request: Request, spec: ModelSpec) -> None:
    end, hidden_size = 0, spec.hidden_size
    if request.rope_positions and len(request.rope_positions) != 4 * 3 * request.num_prompt_tokens:
        raise InvalidRequestError("positions of the rope's axes do not fit the prompt", "prompt")
    widths, is_made = {hidden_size, hidden_size * (1 + spec.deepstack)}, not request.shows_pictures
    for run in request.embeddings:
        if not run.num_tokens or (is_made and len(run.values) not in [4 * width * run.num_tokens for width in widths]):
            raise InvalidRequestError(
                f"{run.num_tokens} embeddings have {len(run.values) // 4} values; the model's have {hidden_size} each",
                "prompt_embeds",
            )
        if run.start < 0 or run.end > request.num_prompt_tokens:
            place = f"tokens {run.start} to {run.end - 1} of a prompt of {request.num_prompt_tokens}"
            raise InvalidRequestError(f"embeddings are given for {place}", "prompt_embeds")
        if run.start < end:
            raise InvalidRequestError(f"two embeddings are given for token {run.start} of the prompt", "prompt_embeds")
        end = run.end


def build_forward_input(batch: ScheduledBatch, cache: KVCacheManager) -> ForwardInput:
    """Arrays of one step, copied: the cache may go on changing while the step runs."""
    columns = batch.columns
    rows, positions = columns.numbers, columns.num_computed_tokens
    if not columns.only_decodes:
        rows = np.repeat(columns.numbers, columns.num_tokens)
        firsts = columns.num_computed_tokens - columns.starts[:-1]
        positions = np.arange(len(columns.token_ids), dtype=np.int32) + np.repeat(firsts, columns.num_tokens)
    return ForwardInput(
        columns=columns,
        positions=positions,
        slot_mapping=cache.slot_mapping(rows, positions),
        block_tables=cache.block_tables(columns.numbers, columns.most_context_tokens),
        state_moves=batch.state_moves,
    )
