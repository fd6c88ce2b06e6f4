"""The server that the tests of this folder share: the real one, with a model that answers by script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.played_model import PlayedBackend, played_server
from server_thread import RunningServer

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
