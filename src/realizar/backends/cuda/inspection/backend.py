"""`InspectedCUDABackend`: a GPU backend whose steps can be taken apart."""

from __future__ import annotations

import numpy as np

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.inspection.launch_times import read_limit, time_launches
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.cuda.step import WantedTokens
from realizar.backends.inspection import ReadLimit
from realizar.backends.parts import PartTime
from realizar.backends.step_values import StageValues, describe_values, stage_names
from realizar.models.spec import ModelSpec


class InspectedCUDABackend(CUDABackend):
    def _send(self, step: ForwardInput, kind: StepKind, wanted: WantedTokens) -> None:
        self.model.recurring.assume(step)
        super()._send(step, kind, wanted)

    def time_parts(self, step: ForwardInput, repeats: int) -> list[PartTime]:
        return time_launches(self, step, repeats)

    def read_limit(self, step_bytes: int) -> ReadLimit:
        """The limit does not depend on `step_bytes`: the measurement reads more than the caches hold."""
        return read_limit(self)

    def stage_values(self, step: ForwardInput) -> list[StageValues]:
        return read_values(self, self.model.spec, step)


def read_values(backend: CUDABackend, spec: ModelSpec, step: ForwardInput) -> list[StageValues]:
    """Run a step launch by launch, without its graph, and describe the stream at `stage_names`, then the last logits.

    A norm's kernel adds the branch before it to the stream: after it the stream is what the norm has read. No other
    step is on its way.
    """
    stages, found = iter(stage_names(spec)), []
    tokens = len(step.columns.token_ids)
    with device_errors(backend.device.torch_device):
        for launch in backend.launches(step):
            launch.start()
            if launch.name == "norm":
                found.append(describe_values(next(stages), backend.stream(tokens)))
        logits = backend.logits([tokens - 1]).cpu().numpy()
    return [*found, describe_values("logits", np.asarray(logits, np.float32))]
