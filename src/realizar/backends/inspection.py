"""`InspectedBackend`: a backend whose steps can be taken apart, for `realizar profile` and `realizar trace`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from realizar.backends.base import Backend, ForwardInput
from realizar.backends.parts import PartTime
from realizar.backends.step_values import StageValues


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """The rate, in 10^9 bytes a second, at which a device was seen to read `size_bytes` over and over.

    On a CPU these are what a step reads, so that caches count as in a step; on a GPU more than caches hold.
    """

    gb_per_s: float
    size_bytes: int


class InspectedBackend(Backend, Protocol):
    """A `Backend` that also measures and reads its steps. Nothing is in flight when these methods are called."""

    def time_parts(self, step: ForwardInput, repeats: int) -> list[PartTime]:
        """Run each operation of a step alone, `repeats` times over: the best time of each, in the order of the step.

        Raises:
            InvalidRequestError: more rows than can be looked into at once. All are open.
            RealizarError: the operations can't be timed here.
        """

    def read_limit(self, step_bytes: int) -> ReadLimit:
        """Measure how fast this device reads memory; `step_bytes` are the weights and KV cache that one step reads.

        Raises CapacityError where beside the model no memory is free to read.
        """

    def stage_values(self, step: ForwardInput) -> list[StageValues]:
        """Run a step operation by operation: the residual stream at each of `stage_names`, then the last logits."""
