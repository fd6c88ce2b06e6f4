"""The residual stream's values from layer to layer during a prompt, on either backend, for `realizar trace`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from realizar.backends.load_progress import LoadProgress
from realizar.backends.select import make_inspected_backend, resolve_model
from realizar.backends.step_values import StageValues
from realizar.bench.profile import StepWork, one_step
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig


def trace_prompt(
    checkpoint: Checkpoint,
    config: EngineConfig,
    token_ids: Sequence[int],
    progress: LoadProgress | None = None,
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
    needed = replace(config, context_length=length, max_running=1, max_step_tokens=length, graphs=False)
    spec, resolved = resolve_model(checkpoint, needed)
    compared_for = (spec, checkpoint) if config.device_check else None
    backend = make_inspected_backend(resolved.chosen, progress, compared_for)
    try:
        backend.load(spec, checkpoint, resolved)
        step = one_step(backend.capacity(), StepWork(1, length, 0), np.array(token_ids, np.int32))
        return backend.stage_values(step)
    finally:
        backend.shutdown()
