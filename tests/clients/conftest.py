"""The servers that the tests of this folder share: real ones, with a model that answers by script, or one that sees."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.played_model import PlayedBackend, played_server
from images.vision_models import encoded, image_of, write_vision_files
from realizar.config import EngineConfig
from realizar.server.settings import ServerSettings
from server_thread import RunningServer, ServerThread

BACKEND = PlayedBackend()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("default"))  # clients warn of their own future


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    thread = played_server(tmp_path_factory.mktemp("played"), BACKEND)
    yield thread.start()
    thread.stop()


@pytest.fixture
def played(shared_server: RunningServer) -> Iterator[RunningServer]:
    """At its end a test has met no grammar that forbade what the script wrote."""
    BACKEND.forbidden.clear()
    yield shared_server
    assert BACKEND.forbidden == []


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Of a tiny model that sees, with random weights."""
    path = write_vision_files(tmp_path_factory.mktemp("vision"))
    thread = ServerThread(path, ServerSettings(), EngineConfig(threads=1))
    yield thread.start()
    thread.stop()


@pytest.fixture(scope="session")
def png() -> bytes:
    """An image of which that model makes three rows of three tiles, and the whole: 160 tokens and marks."""
    pillow = pytest.importorskip("PIL.Image", reason="images are made by Pillow")
    return encoded(pillow.fromarray(image_of((90, 96))))
