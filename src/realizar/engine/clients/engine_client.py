"""`EngineClient` takes requests and gives text, with the engine in this process.

A caller that waits for a request runs the engine's steps, for all open requests. Threads may share a client.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Self

from realizar.engine.clients.growing_choice import GrowingChoice, GrowingText
from realizar.engine.clients.interrupts import interrupts_deferred
from realizar.engine.clients.output_processor import OutputProcessor
from realizar.engine.clients.prepare import prepare_request
from realizar.engine.core.delta_columns import DeltaColumns
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import DeviceLostError, EngineDeadError, QueueFullError, RealizarError, RequestFailedError
from realizar.outputs import ChoiceDelta, RequestOutput
from realizar.request import Pooling, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams

_ANEW = "close this LLM and make a new one"
_IN_A_NEW_PROCESS = "no model can run on that GPU in this process any more: make a new LLM in a new process"


class RequestStream:
    """One open request. Iterate its deltas, then read `result`; use it as a context manager, or call `close`."""

    def __init__(self, client: EngineClient, request_id: str) -> None:
        self._client = client
        self._deltas: deque[ChoiceDelta] = deque()
        self._noted: list[GrowingChoice] = []
        self._output: RequestOutput | None = None
        self._error: RealizarError | None = None
        self.request_id = request_id

    def __iter__(self) -> Iterator[ChoiceDelta]:
        """Iterate the deltas as they arrive. It raises EngineDeadError if the engine stopped."""
        while True:
            while self._deltas:
                yield self._deltas.popleft()
            if self.done:
                break
            self._client.drive(self)
        if self._error is not None:
            raise self._error

    @property
    def done(self) -> bool:
        return self._output is not None or self._error is not None

    @property
    def has_news(self) -> bool:
        return bool(self._deltas) or self.done

    def result(self) -> RequestOutput:
        """Wait for the whole request. It raises EngineDeadError if the engine stopped."""
        while not self.done:
            self._client.drive(self, until_done=True)
        if self._output is None:
            raise self._error or RealizarError("the request was closed")
        return self._output

    def close(self) -> None:
        if not self.done:
            self._client.abort(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def note(self, choice: GrowingChoice) -> None:
        """The client calls this when a choice has a delta."""
        self._noted.append(choice)

    def take_noted(self) -> None:
        """The client calls this once it has all deltas of a step."""
        noted, self._noted = self._noted, []  # a text that fails ends this stream meanwhile
        for choice in noted:
            delta = choice.take_delta()
            if delta is not None:
                self._deltas.append(delta)

    def end(self, output: RequestOutput | None, error: RealizarError | None = None) -> None:
        self.take_noted()
        self._output, self._error = output, error


class EngineClient:
    """An engine in this process, with the text of its requests, whose `OutputListener` it is.

    `close` closes `core`. `new_text` makes the text of a choice from the request's sampling parameters.
    """

    def __init__(
        self, core: EngineCore, new_text: Callable[[SamplingParams], GrowingText], end_ids: Collection[int] = ()
    ) -> None:
        self._core = core
        self._columns = DeltaColumns()
        self._processor = OutputProcessor(new_text, self)
        self._end_ids = frozenset(end_ids)
        self._streams: dict[str, RequestStream] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._death: str | None = None
        self._closed = False

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        prompt: str | None = None,
        score_only: bool = False,
        pooling: Pooling | None = None,
        keep_deltas: bool = True,
        embeddings: Sequence[PromptEmbeddings] = (),
    ) -> RequestStream:
        """Queue a request, as `AsyncEngine.generate`. It runs while a caller waits for it or for another request.

        Raises:
            InvalidRequestError, ContextLengthError, CapacityError: the request can't run.
            QueueFullError: too many requests or grammars are open; see `wait_for_an_end`.
            EngineDeadError: the engine stopped.
        """
        request = prepare_request(
            f"request-{next(self._numbers)}",
            prompt_token_ids,
            sampling,
            vocab_size=self._core.spec.vocab_size,
            max_request_tokens=self._core.max_request_tokens,
            end_ids=self._end_ids,
            score_only=score_only,
            pooling=pooling,
            has_snapshots=self._core.capacity.num_snapshots > 0,
            embeddings=embeddings,
        )
        self._prepare_grammar(request)
        stream = RequestStream(self, request.request_id)
        with interrupts_deferred(), self._lock:
            if self._death is not None:
                raise EngineDeadError(self._death)
            self._core.add(request)
            self._processor.add(request, prompt, stream.note if keep_deltas else None)
            self._streams[request.request_id] = stream
        return stream

    def drive(self, stream: RequestStream, *, until_done: bool = False) -> None:
        """Run one step, unless another thread has already brought news for this stream."""
        with interrupts_deferred(), self._lock:
            if not (stream.done if until_done else stream.has_news):
                self._step()

    def wait_for_an_end(self, on_step: Callable[[], None]) -> bool:
        """Run steps until any open request has ended; False if none is open."""
        with self._lock:
            waiting = list(self._streams.values())
        while waiting and not any(stream.done for stream in waiting):
            self.drive(waiting[0], until_done=True)
            on_step()
        return bool(waiting)

    def abort(self, stream: RequestStream) -> None:
        """End a request without an output; its blocks are free at once."""
        with interrupts_deferred(), self._lock:
            if stream.request_id in self._streams:
                self._forget(stream)
                stream.end(None, RealizarError("the request was closed"))

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Shut the engine down; waiting callers get EngineDeadError. Idempotent."""
        with interrupts_deferred(), self._lock:
            self._closed = True
            self._core.close()
            self._fail(EngineDeadError("the engine was closed"))

    def _prepare_grammar(self, request: Request) -> None:
        try:
            self._core.prepare(request.sampling)
        except QueueFullError:
            with interrupts_deferred(), self._lock:
                self._core.release_grammars(request)
            self._core.prepare(request.sampling)

    def _step(self) -> None:
        try:
            outputs = self._core.step()
        except EngineDeadError as error:
            lost = isinstance(error.__cause__, DeviceLostError)
            self._death = f"{error}; {_IN_A_NEW_PROCESS if lost else _ANEW}"
            self._fail(EngineDeadError(self._death))
            return
        if outputs:
            self._processor.take_in(self._columns.columns(outputs))
            for stream in list(self._streams.values()):  # one whose text fails is forgotten meanwhile
                stream.take_noted()

    def choice_ended(self, choice: GrowingChoice) -> None:
        if isinstance(choice.stop_reason, str):
            self._abort_in_core(choice.request_id, choice.index)

    def request_ended(self, output: RequestOutput, last: GrowingChoice) -> None:
        self._streams.pop(output.request_id).end(output)

    def request_failed(self, request_id: str, error: RealizarError) -> None:
        stream = self._streams[request_id]
        self._forget(stream)
        stream.end(None, error)

    def text_failed(self, request_id: str) -> None:
        if request_id in self._streams:  # a second choice may fail while the first one's failure ends the stream
            self.request_failed(request_id, RequestFailedError("the tokens could not be turned into text"))

    def _abort_in_core(self, request_id: str, choice: int | None = None) -> None:
        self._core.abort(request_id, choice)
        self._columns.forget(request_id, choice)

    def _forget(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self._abort_in_core(stream.request_id)
        self._processor.discard(stream.request_id)

    def _fail(self, error: EngineDeadError) -> None:
        streams, self._streams = self._streams, {}
        self._processor.discard_all()
        for stream in streams.values():
            stream.end(None, error)
