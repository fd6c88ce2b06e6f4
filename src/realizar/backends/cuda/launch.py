"""One operation of a step, ready to start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from realizar.backends.cuda.step_arrays import StepShape


@dataclass(frozen=True, slots=True)
class Launch:
    """`run` starts the operation's kernels; `name` is what a profile calls it."""

    name: str
    run: Callable[[StepShape], None]
