"""`Launch`: one operation of a step, ready to start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from realizar.backends.cuda.step_arrays import StepShape
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention


@dataclass(frozen=True, slots=True)
class Launch:
    """`run` starts the operation's kernels.

    Attributes:
        name: what a profile calls it.
        weight_bytes: of the matrices that it reads.
        share_of_token: of those bytes, that one token reads at most: of the matrices of experts.
        attention: of the layer whose cache it reads; None for what reads none.
    """

    name: str
    run: Callable[[StepShape], None]
    weight_bytes: int = 0
    share_of_token: float = 1.0
    attention: Attention | SharedAttention | None = None


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """A launch of one step: `start` starts it. `bytes_read` counts the weights and the KV cache that it reads."""

    name: str
    start: Callable[[], None]
    bytes_read: int
