"""What a backend prepares after it is ready: in idle times, and between steps that ask for it."""

from __future__ import annotations

import threading

import pytest

from engine.core.core_runs import run, tokens
from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.process.loop import EngineLoop
from realizar.engine.process.messages import Failed, Shutdown
from realizar.errors import CapacityError, CaptureLostError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from resolving import new_core
from scripted_backend import ScriptedBackend, expected_tokens, make_spec
from waits import HANG_S

GREEDY = SamplingParams(temperature=0.0)


class LaterBackend(ScriptedBackend):
    """Has `left` kinds to prepare, and always asks for one as long as there are any; then it raises `error`, if any."""

    def __init__(self, left: int, error: Exception | None = None) -> None:
        super().__init__()
        self.left, self.error, self.calls = left, error, list[tuple[bool, int]]()
        self.core: EngineCore | None = None
        self.done = threading.Event()

    @property
    def asks_for_graphs(self) -> bool:
        return self.left > 0 or self.error is not None

    def prepare_next(self, *, asked: bool) -> bool:
        assert self.core is not None
        self.calls.append((asked, len(self.core._in_flight)))
        if self.left == 0:
            self.done.set()
            if self.error is not None:
                raise self.error
            return False
        self.left -= 1
        return True


def core_of(backend: LaterBackend, *, steps_in_flight: int = 2) -> EngineCore:
    core = backend.core = new_core(backend, make_spec((None,)), EngineConfig(), steps_in_flight=steps_in_flight)
    return core


def test_steps_get_what_they_ask_for_while_none_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realizar.engine.core.engine_core._STEPS_BETWEEN", 0)
    backend = LaterBackend(3)
    core = core_of(backend)
    prompts = {f"{row}": (row, 5, 7) for row in range(3)}
    for name, ids in prompts.items():
        core.add(Request(name, ids, GREEDY, 12))
    outputs = run(core)
    for name, ids in prompts.items():
        assert tokens(outputs[name]) == expected_tokens(ids, (None,), GREEDY, 12)
    assert backend.calls == [(True, 0)] * 3


def test_an_idle_engine_prepares_all_that_is_left() -> None:
    backend = LaterBackend(5)
    loop = EngineLoop(lambda _event: None)
    thread = threading.Thread(target=loop.run, args=(lambda: core_of(backend),))
    thread.start()
    try:
        assert backend.done.wait(HANG_S)
    finally:
        loop.post(Shutdown())
        thread.join(HANG_S)
    assert backend.calls == [(False, 0)] * 6


def test_what_fails_is_given_up_and_steps_go_on(caplog: pytest.LogCaptureFixture) -> None:
    backend = LaterBackend(1, CapacityError("the GPU is out of memory: tried 2 GiB"))
    core = core_of(backend)
    assert [core.prepare() for _ in range(4)] == [True, False, False, False]
    assert len(backend.calls) == 2
    assert "out of memory" in caplog.text
    core.add(Request("a", (1, 2), GREEDY, 4))
    assert tokens(run(core)["a"]) == expected_tokens((1, 2), (None,), GREEDY, 4)


def test_a_device_that_is_lost_is_reported_so_that_another_engine_goes_without_graphs() -> None:
    events: list[object] = []
    EngineLoop(events.append).run(lambda: core_of(LaterBackend(1, CaptureLostError("the device is lost"))))
    assert isinstance(events[-1], Failed)
    assert events[-1].error.kind == "CaptureLostError"
