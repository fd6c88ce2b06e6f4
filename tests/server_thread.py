"""A real server on a free port, with its engine on a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import openai
import pytest
import uvicorn

from realizar.backends.base import Backend
from realizar.backends.load_progress import LoadProgress
from realizar.config import EngineConfig
from realizar.engine import loading
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import EngineLink, ThreadLink
from realizar.engine.loading import find_checkpoint
from realizar.engine.stats import EngineStats
from realizar.replicas.link import ReplicaLink
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.http.listen import uvicorn_config
from realizar.server.served_model import ServedModel, make_served_model
from realizar.server.settings import ServerSettings
from realizar.tokenizer.stop_checker import StopChecker
from waits import HANG_S, wait_until

CONTEXT = 1024
NAME = "org/smollm2"
NAMES = (NAME, "other")
HELD_STEP_S = 0.2


@dataclass(frozen=True)
class RunningServer:
    """`url` without a path; the engine belongs to `loop`; while `free` is not set, each of its steps waits 0.2 s."""

    url: str
    engine: AsyncEngine
    model: ServedModel
    loop: asyncio.AbstractEventLoop
    free: threading.Event

    @contextmanager
    def held_steps(self) -> Iterator[None]:
        """Meanwhile a request of 900 tokens lasts for at least three minutes, on any machine."""
        self.free.clear()
        try:
            yield
        finally:
            self.free.set()

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG_S, **options)

    def wait(self, work: Any) -> Any:
        """The result of a coroutine that runs on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(HANG_S)

    def stats_when_idle(self) -> EngineStats:
        """Figures once nothing runs, waits or holds a block; the audit is clean."""

        def is_idle() -> bool:
            stats = self.wait(self.engine.stats())
            return not (stats.num_running or stats.num_waiting or stats.num_used_blocks)

        wait_until(is_idle)
        assert self.wait(self.engine.audit()) is None
        stats: EngineStats = self.wait(self.engine.stats())
        return stats


class ServerElsewhere(RunningServer):
    """A server that others have started, with the names and the settings of this module; its engine is out of reach."""

    def __init__(self, url: str, checkpoint: Path) -> None:
        for name, value in (("url", url), ("model", make_served_model(find_checkpoint(checkpoint), NAMES, CONTEXT))):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        pytest.skip(f"the {name} of a server elsewhere is out of reach")

    @contextmanager
    def held_steps(self) -> Iterator[None]:
        pytest.skip("the steps of a server elsewhere can't be held")
        yield


class ServerThread:
    """Runs an engine and the application over it on a thread with a loop of its own.

    The engine computes on one thread unless `config` says more: other workers' engines take the other cores. `backend`
    stands in for that of the device, and need not load the weights. `model` has more of `make_served_model`.
    """

    def __init__(
        self,
        checkpoint: Path,
        settings: ServerSettings,
        config: EngineConfig,
        context: int = CONTEXT,
        num_replicas: int = 1,
        backend: Backend | None = None,
        names: Sequence[str] = NAMES,
        **model: Any,
    ) -> None:
        self._context, self._num_replicas, self._backend, self._names = context, num_replicas, backend, names
        self._model = model
        self._checkpoint, self._settings = find_checkpoint(checkpoint), settings
        self._config = replace(config, threads=config.threads or 1)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._started = threading.Event()
        self._free = threading.Event()
        self._free.set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="server")
        self._server: uvicorn.Server | None = None
        self.running: RunningServer | None = None

    def start(self) -> RunningServer:
        self._thread.start()
        assert self._started.wait(HANG_S)
        assert self.running is not None
        return self.running

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(HANG_S)
        self._socket.close()
        assert not self._thread.is_alive()

    def _load(self, progress: LoadProgress) -> EngineCore:
        with mock.patch.object(loading, "make_backend", return_value=self._backend) if self._backend else nullcontext():
            core = loading.load_core(self._checkpoint, self._config, progress=progress)
        step = core.step

        def held_step() -> Any:
            self._free.wait(HELD_STEP_S)
            return step()

        core.step = held_step  # type: ignore[method-assign]
        return core

    async def _run(self) -> None:
        model = make_served_model(self._checkpoint, self._names, self._context, **self._model)

        def new_text(sampling: SamplingParams) -> StopChecker:
            return StopChecker(model.tokenizer, sampling)

        link: EngineLink = ThreadLink(self._load)
        if self._num_replicas > 1:
            link = ReplicaLink([lambda: ThreadLink(self._load)] * self._num_replicas)
        engine = AsyncEngine(link, new_text, model.tokenizer.eos_ids)
        await engine.start()
        await engine.wait_ready()
        app = create_app(engine, model, self._settings)
        self._server = uvicorn.Server(uvicorn_config(app, self._settings))
        port = self._socket.getsockname()[1]
        loop = asyncio.get_running_loop()
        self.running = RunningServer(f"http://127.0.0.1:{port}", engine, model, loop, self._free)
        self._started.set()
        await self._server.serve([self._socket])
        await engine.close()


def exchange(server: RunningServer, sent: bytes, wait_s: float = HANG_S) -> bytes:
    """All that a server answers to some bytes until it closes the connection; sent whole before anything is read."""
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as connection:
        connection.sendall(sent)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer
