"""`InspectedBackend`: a backend whose steps can be taken apart, for `realizar profile` and `realizar trace`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from realizar.backends.base import Backend, ForwardInput
from realizar.backends.parts import PartTime
from realizar.backends.step_values import StageValues


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """The rate at which a device was seen to read memory over and over.

    Attributes:
        gb_per_s: in 10^9 bytes.
        size_bytes: that were read over and over: on a CPU what a step reads, so that caches count for as much as they
            do in a step; on a GPU more than caches hold.
    """

    gb_per_s: float
    size_bytes: int


class InspectedBackend(Backend, Protocol):
    """A `Backend` that also measures and reads its steps. Nothing is in flight when these methods are called."""

    def time_parts(self, step: ForwardInput, repeats: int) -> list[PartTime]:
        """Run each operation of a step alone, `repeats` times over: the best time of each, in the order of the step.

        The step's rows are open.

        Raises:
            InvalidRequestError: more rows than can be looked into at once.
            RealizarError: the operations can't be timed here.
        """

    def read_limit(self, step_bytes: int) -> ReadLimit:
        """Measure how fast this device reads memory.

        Args:
            step_bytes: weights and KV cache that one step reads.

        Raises:
            CapacityError: beside the model no memory is free to read.
        """

    def stage_values(self, step: ForwardInput) -> list[StageValues]:
        """Run a step operation by operation: the residual stream at each of `stage_names`, then the last logits."""
