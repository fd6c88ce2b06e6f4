"""The loop around the core, without a process: what it does with its idle time, and what it loads."""

from __future__ import annotations

import threading

import pytest

from realizar.backends.select import ChosenDevice
from realizar.config import EngineConfig
from realizar.engine import process
from realizar.engine.core import EngineCore
from realizar.engine.process_loop import EngineLoop
from realizar.engine.process_messages import Add, AskStats, Load, Shutdown, StatsAnswer
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from scripted_backend import ScriptedBackend, make_spec

GREEDY = SamplingParams(temperature=0.0)


def test_an_idle_engine_audits_itself_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every idle time: a block that got lost is told, and not for ever again.

    The engine is idle as soon as it has nothing to do. It answers a question after all that it had to do before.
    """
    monkeypatch.setattr("realizar.engine.process_loop._IDLE_S", 0.0)
    core = EngineCore(ScriptedBackend(), make_spec((None,)), EngineConfig())
    audited, answered = threading.Semaphore(0), threading.Semaphore(0)
    honest = core.audit

    def audit() -> None:
        audited.release()
        honest()

    monkeypatch.setattr(core, "audit", audit)
    loop = EngineLoop(lambda event: answered.release() if isinstance(event, StatsAnswer) else None)
    thread = threading.Thread(target=loop.run, args=(lambda: core,))
    thread.start()
    try:
        for number in range(2):
            loop.post(Add(Request(str(number), (number, 5), GREEDY, 1)))
            assert audited.acquire(timeout=60)
            for ticket in range(3):
                loop.post(AskStats(ticket))
                assert answered.acquire(timeout=60)
            assert not audited.acquire(blocking=False)
            assert ("books are wrong" in caplog.text) is (number > 0)
            core._cache._groups[0].pool._free.pop()
    finally:
        loop.post(Shutdown())
        thread.join(60)


def test_a_gpu_runs_256_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is loaded is kept from the collector, each time."""
    configs: list[EngineConfig] = []
    frozen: list[int] = []
    monkeypatch.setattr(process.gc, "freeze", lambda: frozen.append(len(configs)))
    core = EngineCore(ScriptedBackend(), make_spec((None,)), EngineConfig())
    monkeypatch.setattr(core, "read_vocabulary", lambda: None)
    monkeypatch.setattr(process, "find_checkpoint", lambda _: None)
    monkeypatch.setattr(process, "load_core", lambda _, config, **__: configs.append(config) or core)
    for device in ("cuda", "cpu"):
        monkeypatch.setattr(process, "choose_device", lambda _, device=device: ChosenDevice(device))
        for fit_running in (True, False):
            process.load_model(Load("model", EngineConfig(), fit_running=fit_running), lambda *_: None)
    assert [config.max_running for config in configs] == [256, 64, 64, 64]
    assert frozen == [1, 2, 3, 4]
