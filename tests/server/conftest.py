"""The server that the tests of this folder share: SmolLM2 on a free port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import CONTEXT, RunningServer, ServerElsewhere, ServerThread
from waits import HANG_S


@pytest.fixture(scope="session")
def server(smollm2_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """Open to all, embeddings on."""
    if url := request.config.getoption("--server-url"):
        yield ServerElsewhere(url, smollm2_path)
        return
    settings = ServerSettings(embeddings="last", max_body_bytes=4 << 20)
    thread = ServerThread(smollm2_path, settings, EngineConfig(context_length=CONTEXT, max_running=16))
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
