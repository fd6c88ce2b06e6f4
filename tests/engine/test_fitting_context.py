"""The context that fits is found from the header, before any weight is read; loading may find that half of it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realizar.backends.cpu import plan as cpu_plan
from realizar.backends.cpu.kv import memory as kv_memory
from realizar.backends.select import resolve_model
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine import loading
from realizar.engine.loading import fitting_context, load_fitting_core
from realizar.errors import CapacityError, UnsupportedModelError
from realizar.models.generated.generate import generate_gguf
from realizar.models.registry import build_spec

CONFIG = EngineConfig(device="cpu", threads=1, max_running=1, max_step_tokens=16)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    generate_gguf("tiny", path, "q4_k_m")
    return open_checkpoint(path)


def give(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let `size` bytes be free, before loading and after it."""
    monkeypatch.setattr(cpu_plan, "free_memory_bytes", lambda: size)
    monkeypatch.setattr(kv_memory, "free_memory_bytes", lambda: size)


def needed(checkpoint: Checkpoint, context: int) -> tuple[int, int]:
    """Bytes for a context: of weights and workspace, and of one request's cache."""
    spec, config = resolve_model(checkpoint, replace(CONFIG, context_length=context))
    plan = cpu_plan.plan_memory(spec, checkpoint, config, 1 << 40)
    return plan.needed_bytes, plan.contexts[-1].request_bytes


def test_the_largest_context_that_fits_is_loaded_once(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_spec(checkpoint).context_length
    loads: list[int | None] = []
    load = loading.load_core

    def counted(given: Checkpoint, config: EngineConfig, **options: Any) -> Any:
        loads.append(config.context_length)
        return load(given, config, **options)

    monkeypatch.setattr(loading, "load_core", counted)
    fixed, request = needed(checkpoint, whole // 2)
    give(monkeypatch, fixed + int(request / 0.4) + 64)
    core = load_fitting_core(checkpoint, CONFIG)
    assert core.config.context_length == whole // 2
    core.close()
    assert loads == [whole // 2]
    give(monkeypatch, 1 << 36)
    assert fitting_context(checkpoint, CONFIG) == whole


def test_what_does_not_fit_at_all_is_refused_with_its_sizes(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_core", lambda *_arguments, **_options: pytest.fail("weights were read"))
    give(monkeypatch, 1 << 20)
    with pytest.raises(CapacityError, match=r"does not fit: [\d.]+ kB of weights, .* of 512 tokens, with 1\.0 MB free"):
        load_fitting_core(checkpoint, CONFIG)


def test_half_of_a_plan_that_was_off_is_tried_once(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan's free memory holds the whole context; the memory that loading finds holds half of it, or less."""
    whole = build_spec(checkpoint).context_length
    loads: list[int | None] = []
    load, most = loading.load_core, whole // 2

    def short_of_memory(given: Checkpoint, config: EngineConfig, **options: Any) -> Any:
        loads.append(config.context_length)
        if config.context_length is None or config.context_length > most:
            raise CapacityError("the GPU is out of memory")
        return load(given, config, **options)

    monkeypatch.setattr(loading, "load_core", short_of_memory)
    core = load_fitting_core(checkpoint, CONFIG)
    assert core.config.context_length == whole // 2
    core.close()
    assert f"{whole} tokens does not fit; {whole // 2} tokens are tried: the GPU is out" in caplog.text
    most = 0
    with pytest.raises(CapacityError, match="out of memory"):
        load_fitting_core(checkpoint, CONFIG)
    assert loads == [whole, whole // 2] * 2


def test_an_error_that_is_not_of_memory_is_not_tried_again(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fails(*_arguments: Any, **_options: Any) -> None:
        calls.append(1)
        raise UnsupportedModelError("no such kernel")

    monkeypatch.setattr(loading, "load_core", fails)
    with pytest.raises(UnsupportedModelError):
        load_fitting_core(checkpoint, CONFIG)
    assert calls == [1]
