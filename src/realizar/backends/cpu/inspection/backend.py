"""`InspectedCPUBackend`: a CPU backend whose steps can be taken apart."""

from __future__ import annotations

from realizar.backends.bandwidth import LEAST_BYTES, read_bandwidth
from realizar.backends.base import ForwardInput
from realizar.backends.cpu.inspection.operation_times import time_operations
from realizar.backends.cpu.inspection.step_values import read_values
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.inspection import ReadLimit
from realizar.backends.parts import PartTime
from realizar.backends.step_values import StageValues


class InspectedCPUBackend(CPUBackend):
    """The `InspectedBackend` of CPUs."""

    def begin(self, forward_input: ForwardInput) -> None:
        self.model.states.assume(forward_input.columns)
        super().begin(forward_input)

    def time_parts(self, step: ForwardInput, repeats: int) -> list[PartTime]:
        return time_operations(self, self.spec, step, repeats)

    def read_limit(self, step_bytes: int) -> ReadLimit:
        size = max(step_bytes, self.num_threads * LEAST_BYTES)
        return ReadLimit(read_bandwidth(self.num_threads, size), size)

    def stage_values(self, step: ForwardInput) -> list[StageValues]:
        return read_values(self, self.spec, step)
