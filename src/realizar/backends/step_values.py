"""The residual stream from layer to layer of one step, in figures by which two runs can be compared. numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.parts import block_name
from realizar.backends.program import build_program
from realizar.models.spec import ModelSpec

_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class StageValues:
    """The values at one place of a step. Fields are those of the JSON that `realizar trace --json` promises.

    Attributes:
        norm: Euclidean, of the last token's finite values. largest: of their magnitudes.
        num_nan, num_inf: over all tokens of the step.
        samples: of the last token, evenly spaced; 0 for a value that is not finite.
    """

    stage: str
    norm: float
    largest: float
    num_nan: int
    num_inf: int
    samples: tuple[float, ...]


def stage_names(spec: ModelSpec) -> list[str]:
    """Where a step's residual stream is read: where each block leaves it, and at the end; the last logits follow."""
    inputs = [f"layer {block.layer} {block_name(block)} input" for block in build_program(spec).blocks]
    return [*inputs, "last layer output"]


def describe_values(stage: str, values: NDArray[np.float32]) -> StageValues:
    """Figures of float32 [tokens, width]."""
    last = values[-1].astype(np.float64)
    finite = np.where(np.isfinite(last), last, 0.0)
    places = np.linspace(0, len(finite) - 1, min(_SAMPLES, len(finite))).astype(int)
    return StageValues(
        stage=stage,
        norm=float(np.linalg.norm(finite)),
        largest=float(np.abs(finite).max()),
        num_nan=int(np.isnan(values).sum()),
        num_inf=int(np.isinf(values).sum()),
        samples=tuple(float(value) for value in finite[places]),
    )


def distance(values: StageValues, other: StageValues) -> float:
    """The distance of two runs' samples, relative to the other's; infinite where only one has bad values."""
    if (values.num_nan, values.num_inf) != (other.num_nan, other.num_inf):
        return float("inf")
    mine, theirs = np.array(values.samples), np.array(other.samples)
    size = float(np.linalg.norm(theirs))
    apart = float(np.linalg.norm(mine - theirs))
    return apart / size if size else (0.0 if apart == 0.0 else float("inf"))
