"""The residual stream of a step on the CPU, read between operations."""

from __future__ import annotations

import numpy as np

from realizar.backends.base import ForwardInput
from realizar.backends.cpu.operation_times import one_by_one
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.program import Attend, Normalize, build_program
from realizar.backends.step_values import StageValues, describe_values, stage_names
from realizar.models.spec import ModelSpec


def read_values(backend: CPUBackend, spec: ModelSpec, step: ForwardInput) -> list[StageValues]:
    """Run a step operation by operation and describe the stream at each of `stage_names`, then the last logits.

    Args:
        backend: loaded with `spec`, no step on its way.
    """
    backend.begin(step)
    stages, found = iter(stage_names(spec)), []
    bound = iter(one_by_one(backend.programs[0]))
    for operation in build_program(spec).body:
        if isinstance(operation, Normalize) and operation.source == "hidden":
            found.append(describe_values(next(stages), backend.stream(len(step.token_ids))))
        for _ in range(2 if isinstance(operation, Attend) else 1):  # attention is joined by a second
            backend.walk(next(bound))
    found.append(describe_values(next(stages), backend.stream(len(step.token_ids))))
    logits = backend.logits([len(step.token_ids) - 1])
    return [*found, describe_values("logits", np.asarray(logits, np.float32))]
