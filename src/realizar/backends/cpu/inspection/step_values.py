"""The residual stream of a step on the CPU, read between operations."""

from __future__ import annotations

import numpy as np

from realizar.backends.base import ForwardInput
from realizar.backends.cpu.operations import walkable
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.step_values import StageValues, describe_values, stage_names
from realizar.models.spec import ModelSpec


def read_values(backend: CPUBackend, spec: ModelSpec, step: ForwardInput) -> list[StageValues]:
    """Run a step operation by operation and describe the stream at each of `stage_names`, then the last logits.

    Args:
        backend: loaded with `spec`, no step on its way.
    """
    backend.begin(step)
    stages, found = iter(stage_names(spec)), []
    for operation in backend.programs[0].operations:
        if operation.begins_block:
            found.append(describe_values(next(stages), backend.stream(len(step.token_ids))))
        backend.walk(walkable([operation]))
    found.append(describe_values(next(stages), backend.stream(len(step.token_ids))))
    logits = backend.logits([len(step.token_ids) - 1])
    return [*found, describe_values("logits", np.asarray(logits, np.float32))]
