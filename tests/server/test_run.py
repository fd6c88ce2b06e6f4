"""`run_server` in this process; `tests/engine/process/test_serve.py` runs the command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast

import pytest

from number_text import NumberText
from realizar.backends.load_progress import LoadProgress
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import ThreadLink
from realizar.errors import CapacityError
from realizar.server.app import create_app
from realizar.server.run import SWITCH_INTERVAL_S, OwnFront, open_port, run_server
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model


@pytest.fixture
def switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
def test_worker_threads_hand_the_interpreter_to_the_event_loop_soon() -> None:
    def fail(progress: LoadProgress) -> EngineCore:
        raise CapacityError("the weights do not fit")

    app = create_app(cast("Any", ScriptedEngine()), scripted_model(), ServerSettings())
    with open_port("127.0.0.1", 0) as listener, pytest.raises(CapacityError, match="do not fit"):
        run_server(
            OwnFront(app, ServerSettings()),
            AsyncEngine(ThreadLink(fail), NumberText),
            listener,
            loading=lambda what, share: None,
            ready=lambda: None,
            draining=lambda count: None,
        )
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
