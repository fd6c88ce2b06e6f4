"""`InspectedCUDABackend`: a GPU backend whose steps can be taken apart."""

from __future__ import annotations

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.inspection.launch_times import read_limit, time_launches
from realizar.backends.cuda.inspection.step_values import read_values
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.cuda.step import WantedTokens
from realizar.backends.inspection import ReadLimit
from realizar.backends.parts import PartTime
from realizar.backends.step_values import StageValues


class InspectedCUDABackend(CUDABackend):
    """The `InspectedBackend` of GPUs."""

    def _send(self, step: ForwardInput, kind: StepKind, wanted: WantedTokens) -> None:
        self.model.recurring.assume(step)
        super()._send(step, kind, wanted)

    def time_parts(self, step: ForwardInput, repeats: int) -> list[PartTime]:
        return time_launches(self, step, repeats)

    def read_limit(self, step_bytes: int) -> ReadLimit:
        """The limit does not depend on `step_bytes`: the measurement reads more than the caches hold."""
        return read_limit(self)

    def stage_values(self, step: ForwardInput) -> list[StageValues]:
        return read_values(self, self.spec, step)
