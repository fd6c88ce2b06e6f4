"""`AsyncEngine` takes requests and gives text on an event loop. Its link reaches an engine in a thread or a process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn, TypeAlias, Unpack

from realizar.backends.base import Transfer
from realizar.engine.frontend.async_link import EngineLink, closed_error
from realizar.engine.frontend.async_stream import AsyncStream, Embedding
from realizar.engine.frontend.growing_choice import GrowingText
from realizar.engine.frontend.open_requests import OpenRequests
from realizar.engine.frontend.prepare import RequestFields, prepare_request
from realizar.engine.frontend.questions import Questions
from realizar.engine.frontend.tasks import Changes
from realizar.engine.process.messages import (
    Accepted,
    EngineBlocked,
    EngineInfo,
    EngineLost,
    Event,
    Loading,
    Outputs,
    PromptRead,
    Question,
    Ready,
    Refused,
    Reply,
    RequestsLost,
)
from realizar.engine.stats import EngineStats
from realizar.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RealizarError,
)
from realizar.ipc.error_records import restore_error
from realizar.request import NO_CLIENT, Client, Pooling, Request
from realizar.sampling_params import SamplingParams

_STATS_PATIENCE_S = 1.0
EngineState: TypeAlias = Literal["starting", "ready", "draining", "dead"]


class AsyncEngine:
    """An engine for one event loop. It bounds the number of open requests and follows the engine's state.

    Args:
        link: closed by `close`.
        new_text: makes the text of a choice from the request's sampling parameters.
        max_queued: choices that may wait, beside those that can run; None takes the engine's `queue_length`.
        pooling: the pooling that the model was trained with, or None.
        keeps_logprobs: True if whole outputs have the log-probabilities that deltas had.

    Attributes:
        state: `starting` also covers the time in which another engine replaces a dead one; `dead` is final.
        error: why the last engine ended.
        loading: the stage and the progress of loading, until the engine is ready.
        fault: the reason why no engine can be started for now, although one ran before; None where none is known.
    """

    def __init__(
        self,
        link: EngineLink,
        new_text: Callable[[SamplingParams], GrowingText],
        end_ids: Collection[int] = (),
        *,
        max_queued: int | None = None,
        pooling: Pooling | None = None,
        keeps_logprobs: bool = False,
    ) -> None:
        self._link = link
        self._changed = Changes()
        self._requests = OpenRequests(new_text, link.send, self._changed.note, keeps_logprobs=keeps_logprobs)
        self._end_ids = frozenset(end_ids)
        self._max_queued = max_queued
        self.state: EngineState = "starting"
        self._info: EngineInfo | None = None
        self.error: RealizarError | None = None
        self._numbers = itertools.count()
        self._asked = Questions(link.send)
        self._last_stats = self._earlier_stats = EngineStats()
        self.pooling = pooling
        self.loading: Loading | None = None
        self.fault: str | None = None

    @property
    def info(self) -> EngineInfo:
        """EngineUnavailableError: the model is not loaded yet. EngineDeadError: the engine is gone for good."""
        if self._info is None:
            self._refuse()
        return self._info

    @property
    def max_queued(self) -> int:
        """Choices that may wait while as many as possible run. It raises what `info` does."""
        return self.info.queue_length if self._max_queued is None else self._max_queued

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def may_be_to_blame(self) -> bool:
        return self._requests.may_be_to_blame

    @property
    def num_restarts(self) -> int:
        return self._earlier_stats.num_restarts

    async def start(self) -> None:
        """Start the engine; returns before it is ready."""
        await self._link.start(self)

    async def wait_ready(self) -> EngineInfo:
        """Wait until the model is loaded. Where it can't be, the class of the RealizarError says why."""
        while self.state == "starting":
            await self._changed.wait()
        if self.state == "dead":
            raise self.error or closed_error()
        return self.info

    async def wait_dead(self) -> RealizarError:
        while self.state != "dead":
            await self._changed.wait()
        return self.error or closed_error()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        keep_deltas: bool = True,
        score_only: bool = False,
        **fields: Unpack[RequestFields],
    ) -> AsyncStream:
        """Queue a request; returns once the engine has it. Close the stream, whatever happens.

        Args:
            request_id: unique among open requests; None makes one.
            prompt: text of the prompt, for the output.
            keep_deltas: True if the deltas will be iterated; False if only `result` will be read.
            score_only, fields: as of `prepare_request`.

        Raises:
            InvalidRequestError, ContextLengthError, CapacityError: the request can't run.
            QueueFullError: the limit of open requests is reached, and the client has its share of them.
            EngineUnavailableError: the engine is starting or draining. EngineDeadError: the engine is gone.
        """
        self._check_room(fields.get("client", NO_CLIENT), sampling.n)
        request = self._prepare(request_id, prompt_token_ids, sampling, score_only=score_only, **fields)
        return await self._submit(request, prompt, keep_deltas=keep_deltas)

    async def submit(self, request: Request) -> AsyncStream:
        """Queue a prepared request, of which only the end is wanted, as `generate` does."""
        self._check_room(request.client, request.sampling.n)
        return await self._submit(request, None, keep_deltas=False)

    def end_choice(self, request_id: str, choice: int) -> None:
        """End a choice whose text is complete, while the engine goes on; it is aborted there. Unknown ids pass."""
        self._requests.end_choice(request_id, choice)

    async def embed(
        self,
        prompt_token_ids: Sequence[int],
        pooling: Pooling | None = None,
        *,
        request_id: str | None = None,
        client: Client = NO_CLIENT,
    ) -> Embedding:
        """Pool a prompt's hidden states; `pooling` None takes the model's own, else `last`. Raises as `generate`."""
        self._check_room(client, 1)
        pooling = pooling or self.pooling or "last"
        request = self._prepare(request_id, prompt_token_ids, SamplingParams(), pooling=pooling, client=client)
        async with await self._submit(request, None, keep_deltas=False) as stream:
            output = await stream.result()
        if output.pooled is None:
            raise RealizarError("the engine gave no vector")
        return Embedding(output.pooled, len(output.prompt_token_ids), output.num_cached_tokens, output.snapshots)

    async def stats(self) -> EngineStats:
        """The last known figures, while no engine runs or a long step delays its answer. Counts go on over restarts."""
        if self.state in ("ready", "draining"):
            with suppress(TimeoutError, RealizarError):
                self._last_stats = await self._asked.ask("stats", _STATS_PATIENCE_S)
        return self._last_stats.plus(self._earlier_stats)

    async def audit(self) -> str | None:
        """The fault that the engine's audit finds, or None. It raises EngineDeadError where no engine runs."""
        fault: str | None = await self._ask_running("audit")
        return fault

    async def clear_cache(self) -> None:
        """Have the prefix cache forget all that it holds; requests that run keep what they have. Raises as `info`."""
        await self._ask_running("clear_cache")

    async def sleep(self) -> Transfer:
        """Have an idle engine give its device's memory back; requests are refused until `wake`.

        Raises EngineDeadError where no engine runs, and other errors where the engine is awake as before.
        """
        done: Transfer = await self._ask_running("sleep")
        return done

    async def wake(self) -> Transfer:
        """Have the engine take its device's memory again. Raises as `sleep`; it then is asleep as before."""
        done: Transfer = await self._ask_running("wake")
        return done

    async def drain(self) -> None:
        """Refuse new requests and wait for the open ones."""
        if self.state in ("starting", "ready"):
            self._set_state("draining")
        while len(self._requests) and self.state == "draining":
            await self._changed.wait()

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine; waiting callers get EngineDeadError. `at_once` waits for no step. Idempotent."""
        if self.state != "dead":
            self._die(closed_error())
        await self._link.close(at_once=at_once)

    def handle(self, event: Event) -> None:
        if isinstance(event, Outputs):
            self._requests.take_in(event.deltas)
        elif isinstance(event, Accepted):
            self._requests.answer(event.request_id, None, event.replica)
        elif isinstance(event, Refused):
            self._requests.answer(event.request_id, restore_error(event.error))
        elif isinstance(event, PromptRead):
            self._requests.note_progress(event)
        elif isinstance(event, RequestsLost):
            self._requests.lose(event)
        elif isinstance(event, Loading):
            self.loading = event
        elif isinstance(event, Ready):
            self._info, self.loading, self.fault = event.info, None, None
            if self.state == "starting":
                self._set_state("ready")
        elif isinstance(event, EngineLost):
            self._lose(event, restore_error(event.error))
        elif isinstance(event, EngineBlocked):
            self.fault = event.reason
        elif isinstance(event, Reply):
            self._asked.resolve(event)

    def _lose(self, event: EngineLost, error: RealizarError) -> None:
        if self.state == "dead":
            return
        if event.blame:
            self._requests.suspect_all()
        if not event.counted:
            self._earlier_stats = self._last_stats.plus(self._earlier_stats)
            self._last_stats = EngineStats()
        if not event.restarting:
            self._die(error)
            return
        if not event.counted:
            self._earlier_stats = self._earlier_stats.plus(EngineStats(num_restarts=1))
        self.error = error
        if self.state == "ready":
            self._set_state("starting")
        self._fail(error)

    def _die(self, error: RealizarError) -> None:
        self.error = error
        self._set_state("dead")
        self._fail(error)

    def _fail(self, error: RealizarError) -> None:
        death = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        self._requests.fail(death)
        self._asked.fail(death)

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._changed.note()

    async def _submit(self, request: Request, prompt: str | None, *, keep_deltas: bool) -> AsyncStream:
        release = await self._requests.suspects.admit(request)
        try:
            self._check_room(request.client, request.sampling.n)
            stream = await self._requests.submit(request, prompt, keep_deltas=keep_deltas)
        except BaseException:
            release()
            raise
        stream.when_done(release)
        return stream

    def _prepare(
        self,
        request_id: str | None,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        score_only: bool = False,
        **fields: Unpack[RequestFields],
    ) -> Request:
        return prepare_request(
            request_id or f"request-{next(self._numbers)}",
            prompt_token_ids,
            sampling,
            vocab_size=self.info.vocab_size,
            max_request_tokens=self.info.max_request_tokens,
            end_ids=self._end_ids,
            score_only=score_only,
            has_snapshots=self.info.capacity.num_snapshots > 0,
            **fields,
        )

    async def _ask_running(self, what: Question) -> Any:
        if self.state not in ("ready", "draining"):
            self._refuse()
        return await self._asked.ask(what)

    def _check_room(self, client: Client, num_choices: int) -> None:
        if self.state != "ready":
            self._refuse()
        places, max_running = self._requests.places, self.info.max_running
        room = max_running + self.max_queued
        if num_choices > room:
            raise InvalidRequestError(f"n is {num_choices}; at most {room} answers run at once", "n")
        if not places.has_room(client, num_choices, room):
            raise QueueFullError(
                f"the server is full ({places.num_taken} answers running or waiting, limit {room}); try again later",
                self._requests.wait_s(places.num_taken - max_running),
            )

    def _refuse(self) -> NoReturn:
        if self.state == "dead":
            raise EngineDeadError(str(self.error or closed_error()))
        if self.state == "draining":
            raise EngineUnavailableError("the server is shutting down", 5.0)
        if self.fault is not None:
            raise EngineUnavailableError(f"the model can't be loaded now: {self.fault}", 30.0)
        what = "" if self.loading is None else f" ({self.loading.what} {self.loading.share:.0%})"
        raise EngineUnavailableError(f"the model is being loaded{what}", 5.0)
