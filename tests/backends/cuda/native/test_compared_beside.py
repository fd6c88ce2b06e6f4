"""A load beside which another process compares the device with the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends import select
from realizar.backends.cuda import device as device_module
from realizar.backends.cuda import runner
from realizar.backends.cuda.device import Family, interpreter_device
from realizar.backends.cuda.load import load_model
from realizar.backends.devices import ChosenDevice
from realizar.backends.verdict import beside, kept
from realizar.backends.verdict.judge import Verdict
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.loading import load_core
from tiny_model import write_tiny_model


def test_what_is_compared_beside_a_load_counts_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The load begins again without what another process has found to be wrong; a later one knows it."""
    roomy = replace(interpreter_device(), name="H900", memory_bytes=1 << 40)
    chosen, choose = ChosenDevice("cuda", 0, roomy.name), select.choose_device
    monkeypatch.setattr(select, "choose_device", lambda wanted: choose(wanted) if wanted == "cpu" else chosen)
    monkeypatch.setattr(device_module, "open_device", lambda _index: roomy)
    monkeypatch.setattr(kept, "user_cache", lambda: tmp_path)
    asked: list[tuple[int, list[str]]] = []

    def compare(index: int, names: list[str]) -> Callable[[], None]:
        asked.append((index, names))
        verdict = Verdict("1 nats apart", frozenset({"attention"}), False)
        return lambda: kept.keep_verdicts(roomy, {"small of q4_k_m": verdict, "small of bf16": verdict})

    monkeypatch.setattr(beside, "compare", compare)
    loads: list[frozenset[Family]] = []

    def load(*arguments: Any, **options: Any) -> Any:
        loads.append(arguments[3].without)
        return load_model(*arguments, **options)

    monkeypatch.setattr(runner, "load_model", load)
    write_tiny_model(tmp_path / "model.gguf")
    config = EngineConfig(
        device="cuda", threads=1, max_running=2, max_step_tokens=16, context_length=64, kv_cache_bytes=1 << 20
    )
    for expected in ([frozenset(), {"attention"}], [{"attention"}]):
        loads.clear()
        caplog.clear()
        load_core(open_checkpoint(tmp_path / "model.gguf"), config, may_restart=True).close()
        assert loads == expected
        (line,) = (record.message for record in caplog.records if record.levelno >= logging.WARNING)
        assert line.endswith("with kernels of attention (1 nats apart); Triton attends")
    assert len(asked) == 1
