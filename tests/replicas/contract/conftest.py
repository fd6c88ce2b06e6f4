"""The server of the contract's tests: SmolLM2 in two replicas, each an engine on a thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import CONTEXT, RunningServer, ServerThread
from waits import HANG_S


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[RunningServer]:
    """Open to all, embeddings on; as many answers run at once as in the server of one engine."""
    settings = ServerSettings(embeddings="last", max_body_bytes=4 << 20)
    config = EngineConfig(context_length=CONTEXT, max_running=8, threads=1)
    thread = ServerThread(smollm2_path, settings, config, num_replicas=2)
    yield thread.start()
    thread.stop()


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """The official client."""
    with server.client() as client:
        yield client


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A plain client."""
    with httpx.Client(base_url=server.url, timeout=HANG_S) as client:
        yield client
