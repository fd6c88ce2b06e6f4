"""`realizar trace`: the residual stream's values from layer to layer during a prompt, on either backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from realizar.backends.select import choose_device, make_backend
from realizar.backends.step_values import StageValues
from realizar.bench.profile import StepWork, one_step
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec


def trace_prompt(
    checkpoint: Checkpoint,
    config: EngineConfig,
    token_ids: Sequence[int],
    progress: Callable[[str, float], None] | None = None,
) -> list[StageValues]:
    """Load a model, read a prompt in one step, and describe the values at each stage.

    Args:
        config: `context_length`, `max_running` and `max_step_tokens` are set to what the step needs.
        token_ids: not empty.

    Raises:
        UnsupportedModelError, CheckpointError, CapacityError: the weights can't be loaded.
        ContextLengthError: the model's context is shorter.
    """
    length = len(token_ids)
    spec, device = build_spec(checkpoint, length), choose_device(config.device)
    needed = replace(config, context_length=length, max_running=1, max_step_tokens=length, graphs=False)
    backend = make_backend(device, progress)
    try:
        backend.load(spec, checkpoint, needed)
        step = replace(one_step(backend.capacity(), StepWork(1, length, 0)), token_ids=np.array(token_ids, np.int32))
        if device.kind == "cuda":
            from realizar.backends.cuda.runner import CUDABackend
            from realizar.backends.cuda.step_values import read_values as read_on_gpu

            assert isinstance(backend, CUDABackend)
            return read_on_gpu(backend, spec, step)
        from realizar.backends.cpu.runner import CPUBackend
        from realizar.backends.cpu.step_values import read_values

        assert isinstance(backend, CPUBackend)
        return read_values(backend, spec, step)
    finally:
        backend.shutdown()
