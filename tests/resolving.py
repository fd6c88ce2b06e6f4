"""Configurations of tests with nothing left open, as loading makes them of the model and the device, and engines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from realizar.backends.base import Backend
from realizar.backends.devices import THE_CPU, ChosenDevice
from realizar.backends.resolved_config import ResolvedConfig, resolve_config
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import Device, EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import InlineLink
from realizar.engine.frontend.engine_thread import EngineThread, RequestStream
from realizar.engine.frontend.growing_choice import GrowingText
from realizar.engine.llm import LLM
from realizar.models.spec import ModelSpec
from realizar.sampling_params import SamplingParams
from scripted_backend import ScriptedBackend


def resolved(
    spec: ModelSpec, checkpoint: Checkpoint | None, config: EngineConfig, kind: Device = "cpu"
) -> ResolvedConfig:
    """The configuration that loading gives a backend. Without a checkpoint matrices count as quantised."""
    float32_weights = checkpoint is not None and WeightTensors(spec, checkpoint).are_float32(spec.linears())
    device = ChosenDevice(kind, capability=(9, 0) if kind == "cuda" else (0, 0))
    return resolve_config(spec, config, device, float32_weights=float32_weights)


def new_core(
    backend: Backend,
    spec: ModelSpec,
    config: EngineConfig,
    *,
    steps_in_flight: int = 1,
    device: ChosenDevice = THE_CPU,
    **options: Any,
) -> EngineCore:
    """A core around a loaded backend, with as many steps in flight as a test wants."""
    if not isinstance(backend, ScriptedBackend):
        settled = resolve_config(spec, config, device, float32_weights=False)
    else:
        rows = min(config.max_running or backend.max_running, backend.max_running)
        settled = resolve_config(spec, replace(config, max_running=rows), device, float32_weights=False)
        tokens = min(settled.max_step_tokens, backend.max_step_tokens)
        settled = replace(settled, max_step_tokens=tokens, context_length=backend.context_length)
    return EngineCore(backend, spec, replace(settled, steps_in_flight=steps_in_flight), **options)


class EngineClient(EngineThread):
    """Takes requests as `AsyncEngine.generate` does, from any thread. `close` closes `core`."""

    def __init__(
        self, core: EngineCore, new_text: Callable[[SamplingParams], GrowingText], end_ids: Collection[int] = ()
    ) -> None:
        self.core = core
        super().__init__(AsyncEngine(InlineLink(core), new_text, end_ids, max_queued=sys.maxsize, keeps_logprobs=True))

    def submit(self, prompt_token_ids: Sequence[int], sampling: SamplingParams, **fields: Any) -> RequestStream:
        return self.stream(self.engine.generate(prompt_token_ids, sampling, **fields))


def core_of(llm: LLM) -> EngineCore:
    link = llm._thread.engine._link
    assert isinstance(link, InlineLink)
    return link._core
