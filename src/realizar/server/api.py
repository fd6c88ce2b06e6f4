"""`Api` holds what handlers work with to use one model; the functions here are shared by several handlers."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from starlette.requests import Request

from realizar import __version__
from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.clients.async_stream import AsyncStream
from realizar.errors import EngineUnavailableError
from realizar.outputs import ChoiceDelta, RequestOutput
from realizar.server.generation.token_names import TokenNames
from realizar.server.generation.work import Stop, WorkPool
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request_memory import RequestLease, lease_of
from realizar.server.metrics import Metrics
from realizar.server.served_model import ServedModel
from realizar.server.settings import ServerSettings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Api:
    """A model with its engine and its metrics, and the settings of the server.

    `fingerprint` is OpenAI's `system_fingerprint`: after it changes, the same seed may give another answer.
    `token_names` are names of tokens by their text, `token_id_names` by their ids.
    """

    engine: AsyncEngine
    model: ServedModel
    settings: ServerSettings
    metrics: Metrics
    fingerprint: str
    token_names: TokenNames
    token_id_names: TokenNames

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request that can run, prompt and output.

        Raises:
            EngineUnavailableError, EngineDeadError: no engine is ready.
        """
        return self.engine.info.max_request_tokens

    @property
    def max_model_len(self) -> int:
        """The same, or the model's context length while the model is being loaded."""
        try:
            return self.engine.info.max_request_tokens
        except EngineUnavailableError:
            return self.model.context_length

    def names(self, *, as_ids: bool | None) -> TokenNames:
        """Names of tokens; `as_ids` is the request's `return_tokens_as_token_ids`."""
        return self.token_id_names if as_ids else self.token_names


def make_api(engine: AsyncEngine, model: ServedModel, settings: ServerSettings, metrics: Metrics | None = None) -> Api:
    """Make the `Api` of one model; `metrics` are those of its earlier loads, where it was loaded before."""
    digest = hashlib.sha256(f"{__version__} {model.name}".encode()).hexdigest()
    return Api(
        engine,
        model,
        settings,
        metrics or Metrics(model.name),
        f"fp_{digest[:10]}",
        TokenNames(model.tokenizer),
        TokenNames(model.tokenizer, as_ids=True),
    )


def settings_of(request: Request) -> ServerSettings:
    """The settings of the server that a request came to."""
    return cast("ServerSettings", request.app.state.settings)


async def compute(request: Request, function: Callable[[Stop], T], size_bytes: int | None = None) -> T:
    """Run a function on a worker thread when it is the client's turn. The body must have been read.

    Args:
        size_bytes: size of the function's input, if that is not the body.

    Raises:
        ClientDisconnectedError: the client disconnected first; the function was stopped, or never called.
    """
    lease = lease_of(request)
    size = lease.body_bytes if size_bytes is None else size_bytes
    work = cast("WorkPool", request.app.state.work)
    return await unless_disconnected(request.receive, work.run(lease.client.name, size, function))


def note(request: Request, **notes: Any) -> None:
    """Add figures to the request's line in the log."""
    request.scope["state"]["notes"].update(notes)


class Noted(Protocol):
    """A request in the engine, which has figures for its line in the log at any time."""

    @property
    def notes(self) -> dict[str, Any]: ...


async def whole_answer(request: Request, run: Noted, work: Coroutine[Any, Any, T]) -> T:
    """Wait for an answer that is not streamed; the run's figures are noted however it ends.

    Raises:
        ClientDisconnectedError: the client disconnected first; the work was cancelled and has ended.
    """
    try:
        return await unless_disconnected(request.receive, work)
    finally:
        note(request, **run.notes)


def timing_notes(output: RequestOutput | None) -> dict[str, float]:
    """The times of a finished request, for its line in the log; empty if it has no output."""
    if output is None:
        return {}
    timings = output.timings
    return {"queue_s": timings.queue_s, "first_token_s": timings.first_token_s - timings.arrival_s}


def replica_notes(streams: Iterable[AsyncStream]) -> dict[str, str]:
    """The names of the replicas that have a request's prompts, for its line in the log; empty without replicas."""
    names = ",".join(sorted({stream.replica for stream in streams}))
    return {"replica": names} if names else {}


def new_id(prefix: str) -> str:
    """An id for an answer and its request in the engine."""
    return f"{prefix}{secrets.token_hex(16)}"


def now_s() -> int:
    """Unix time."""
    return int(time.time())


async def deltas_of(
    stream: AsyncStream, metrics: Metrics, lease: RequestLease, top: int, enough: Callable[[], bool] = lambda: False
) -> AsyncGenerator[ChoiceDelta]:
    """Iterate the deltas of an open request and count them. The request is closed when the consumer stops.

    Args:
        lease: counts the log-probabilities, which are kept until the end, each with `top` others.
        enough: called after each delta; True ends the request, since its rest is not wanted.
    """
    last_s: dict[int, float] = {}
    started_s = time.monotonic()
    first_s: float | None = None
    try:
        async for delta in stream:
            if delta.prompt_progress is not None:
                yield delta
                continue
            now = time.monotonic()
            first_s = now if first_s is None else first_s
            if delta.token_ids:
                if delta.choice in last_s:
                    metrics.tokens_came(len(delta.token_ids), now - last_s[delta.choice])
                last_s[delta.choice] = now
            if num_logprobs := len(delta.logprobs):
                lease.add_logprobs(num_logprobs, top)
            yield delta
            if enough() and not stream.done:
                metrics.stopped(len(last_s), first_s - started_s, now - started_s)
                return
        metrics.ended(await stream.result())
    except (GeneratorExit, asyncio.CancelledError):
        metrics.aborted()
        raise
    finally:
        stream.close()
