"""Servers of SmolLM2 for suites that others wrote: one at a time, kept until a test asks for other settings."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.config import EngineConfig
from realizar.hub.pull import resolve
from realizar.sampling_params import SamplingParams
from realizar.server.settings import Pooling, ServerSettings
from server_thread import RunningServer, ServerThread

ROWS = 16


@dataclass(frozen=True)
class Options:
    """What a suite's own options come to here."""

    names: tuple[str, ...]
    context: int = 2048
    rows: int = ROWS
    max_tokens: int | None = None
    temperature: float = 0.8
    seed: int | None = None
    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    embeddings: Pooling | None = None
    chat_template: str | None = None
    step_tokens: int | None = None


class Shelf:
    """Holds the server that runs."""

    def __init__(self) -> None:
        self._thread: ServerThread | None = None
        self._options: Options | None = None

    def server(self, options: Options) -> RunningServer:
        if self._thread is None or options != self._options:
            self.stop()
            thread = _thread(options)
            thread.start()
            self._thread, self._options = thread, options
        assert self._thread.running is not None
        return self._thread.running

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.stop()
        self._thread = self._options = None


def _thread(options: Options) -> ServerThread:
    settings = ServerSettings(
        api_keys=options.api_keys,
        cors_origins=options.origins,
        embeddings=options.embeddings,
        max_stored_responses=100,
        allow_request_templates=True,
        allow_cache_clearing=True,
    )
    config = EngineConfig(
        context_length=options.context, max_running=options.rows, max_step_tokens=options.step_tokens, threads=2
    )
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed)
    return ServerThread(
        resolve("smollm2:135m"),
        settings,
        config,
        options.context,
        names=options.names,
        sampling=sampling,
        chat_template=options.chat_template,
    )
