"""The server of the contract's tests: SmolLM2 in two replicas, each an engine on a thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server.conftest import client, http
from server_thread import CONTEXT, RunningServer, ServerThread

__all__ = ["client", "http", "server"]


@pytest.fixture(scope="session")
def server(smollm2_path: Path) -> Iterator[RunningServer]:
    """Open to all, embeddings on; as many answers run at once as in the server of one engine."""
    settings = ServerSettings(embeddings="last", max_body_bytes=4 << 20)
    config = EngineConfig(context_length=CONTEXT, max_running=8, threads=1)
    thread = ServerThread(smollm2_path, settings, config, num_replicas=2)
    yield thread.start()
    thread.stop()
