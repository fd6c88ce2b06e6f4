"""The residual stream of a step on the GPU, read between launches."""

from __future__ import annotations

import numpy as np

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.step_values import StageValues, describe_values, stage_names
from realizar.models.spec import ModelSpec


def read_values(backend: CUDABackend, spec: ModelSpec, step: ForwardInput) -> list[StageValues]:
    """Run a step launch by launch, without its graph, and describe the stream at `stage_names`, then the last logits.

    A norm's kernel adds the branch before it to the stream: after it the stream is what the norm has read.

    Args:
        backend: loaded with `spec`, no step on its way.
    """
    stages, found = iter(stage_names(spec)), []
    tokens = len(step.token_ids)
    with device_errors(backend.device.torch_device):
        for launch in backend.launches(step):
            launch.start()
            if launch.name == "norm":
                found.append(describe_values(next(stages), backend.stream(tokens)))
        logits = backend.logits([tokens - 1]).cpu().numpy()
    return [*found, describe_values("logits", np.asarray(logits, np.float32))]
