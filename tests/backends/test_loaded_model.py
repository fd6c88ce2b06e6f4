"""A backend holds its model as one object, which shutting it down drops: nothing of it stays reachable."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from random_models import Recipe, random_model
from realizar.config import EngineConfig
from resolving import resolved

CONFIG = EngineConfig(
    threads=2, context_length=64, max_running=2, max_step_tokens=32, kv_cache_bytes=16 << 20, graphs=False
)


def cpu_backend() -> Any:
    from realizar.backends.cpu.runner import CPUBackend

    return CPUBackend()


def cuda_backend() -> Any:
    """A CUDA backend under Triton's interpreter, with torch on the CPU."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from realizar.backends.cuda.device import interpreter_device
    from realizar.backends.cuda.runner import CUDABackend

    return CUDABackend(device=interpreter_device())


BACKENDS = pytest.mark.parametrize(("make", "kind"), [(cpu_backend, "cpu"), (cuda_backend, "cuda")])


def parts_of(model: Any) -> dict[str, weakref.ref[Any]]:
    """References to whatever the model holds that can be referred to weakly: not numbers and tuples."""
    found = {}
    for field in dataclasses.fields(model):
        if field.name not in ("spec", "config"):
            try:
                found[field.name] = weakref.ref(getattr(model, field.name))
            except TypeError:
                continue
    return found


@BACKENDS
def test_shutdown_drops_the_model(make: Callable[[], Any], kind: Any) -> None:
    spec, checkpoint = random_model(Recipe(weights="F32", windows=(None,)))
    backend, config = make(), resolved(spec, checkpoint, CONFIG, kind)
    for _ in range(2):  # it can be loaded again
        backend.load(spec, checkpoint, config)
        capacity = backend.capacity()
        assert capacity.kv_cache_dtype == config.kv_dtype == "f32"
        parts = parts_of(backend.model)
        assert {"weights", "kv"} <= set(parts)
        backend.shutdown()
        gc.collect()
        assert {name: part() for name, part in parts.items()} == dict.fromkeys(parts)
        with pytest.raises(RuntimeError, match="no model is loaded"):
            backend.capacity()
    backend.shutdown()


@BACKENDS
def test_a_loaded_model_cannot_be_changed(make: Callable[[], Any], kind: Any) -> None:
    spec, checkpoint = random_model(Recipe(weights="F32", windows=(None,)))
    backend = make()
    backend.load(spec, checkpoint, resolved(spec, checkpoint, CONFIG, kind))
    with pytest.raises(dataclasses.FrozenInstanceError):
        backend.model.weights = None
    backend.shutdown()
