"""The residual stream's values from layer to layer during a prompt, on either backend, for `realizar trace`.

`compare_with_cpu` tells whether a device computes what the CPU does, on a small random model of each kind of layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from realizar.backends.load_progress import LoadProgress
from realizar.backends.select import make_inspected_backend, resolve_model
from realizar.backends.step_values import StageValues, distance
from realizar.bench.profile import StepWork, one_step
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import RealizarError
from realizar.models.generated.generate import generate_gguf
from realizar.models.generated.shapes import SHAPES

_SHAPES = ("tiny", "tiny-moe", "tiny-delta", "tiny-convolution")
_TOLERANCE = 0.2  # roundings of two devices part some hundredths; values of another place or size, about 1
_PROMPT = [7 * number % 511 for number in range(32)]


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
    backend = make_inspected_backend(resolved.chosen, progress)
    try:
        backend.load(spec, checkpoint, resolved)
        step = one_step(backend.capacity(), StepWork(1, length, 0), np.array(token_ids, np.int32))
        return backend.stage_values(step)
    finally:
        backend.shutdown()


class DeviceFaultError(RealizarError):
    """A device computes something else than the CPU."""


def compare_with_cpu(device: str) -> None:
    """Read a prompt with each model on both devices and compare the values from layer to layer.

    Raises:
        DeviceFaultError: the first place where the values part.
    """
    with tempfile.TemporaryDirectory() as folder:
        for shape in _SHAPES:
            path = Path(folder) / f"{shape}.gguf"
            generate_gguf(shape, path, "q4_k_m")
            # All experts: where two are nearly as likely, roundings would choose.
            experts = SHAPES[shape].num_experts or None
            found, expected = (
                trace_prompt(open_checkpoint(path), EngineConfig(device=each, expert_used_count=experts), _PROMPT)
                for each in (device, "cpu")
            )
            for mine, theirs in zip(found, expected, strict=True):
                if mine.num_nan or mine.num_inf:
                    raise DeviceFaultError(f"{device} gives values that are not finite in {shape}: {mine.stage}")
                if (far := distance(mine, theirs)) > _TOLERANCE:
                    raise DeviceFaultError(f"{device} parts from the CPU by {far:.0%} in {shape}: {mine.stage}")
