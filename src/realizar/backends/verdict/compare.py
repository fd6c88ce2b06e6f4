"""Limits of what a backend gives for a small model, and `expected.npz`: what it should give. numpy.

`scripts/verdict/record_small_models.py` writes that file, by the tests' twin in float64; draws are those of the CPU.
"""

from __future__ import annotations

import zlib
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from realizar.backends.verdict.small_models import SmallModel
from realizar.backends.verdict.small_steps import STEPS, Seen
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import RealizarError

STEP_NATS = 0.02
TOKEN_NATS = 0.2
"""Most that a step's distributions may diverge on average, and a token's. The CPU's do by up to 0.004 and 0.04, by the
int8 inputs of its matmuls; a distribution that another token's stands for diverges by 0.4 to 5."""
EQUAL_DRAWS = 0.35
"""Least share of draws that are those of the CPU: roundings move up to a third, and of others some percent agree."""
_EACH = 32  # of so many ids one is recorded
_TOKENS = [sum(count for _, count in parts) for parts in STEPS]


class NoComparisonError(RealizarError):
    """Nothing is recorded of a model that is made here: numpy makes other random numbers."""


def recorded(seen: Seen) -> dict[str, NDArray[np.generic]]:
    """What of a backend's outcome, or of the exact one, is compared."""
    return {"logprobs": seen.logprobs[:, ::_EACH].astype(np.float16), "drawn": seen.drawn.astype(np.int16)}


def digest(checkpoint: Checkpoint) -> NDArray[np.uint32]:
    tensors = checkpoint.tensors
    return np.array([zlib.crc32(tensors[name].data.data) for name in sorted(tensors)], np.uint32)


def difference(model: SmallModel, checkpoint: Checkpoint, seen: Seen) -> str | None:
    """Where a backend goes beyond the limits, or None. NoComparisonError: what is recorded is another model's."""
    expected = {part: _expected()[f"{model}/{part}"] for part in ("digest", "logprobs", "drawn")}
    if not np.array_equal(expected["digest"], digest(checkpoint)):
        raise NoComparisonError(f"{model} is not the model that was recorded: numpy makes other random numbers here")
    found = seen.logprobs[:, ::_EACH]
    # Half the mean square difference of log-probabilities is the divergence of distributions as flat as these.
    nats = np.square(found - expected["logprobs"].astype(np.float64)).mean(axis=1) / 2
    for parts, of_step in zip(STEPS, np.split(nats, np.cumsum(_TOKENS)[:-1]), strict=True):
        place = f"in a step of {len(of_step)} tokens and {len(parts)} rows of {model}"
        if not np.isfinite(of_step).all():
            return f"values that are not finite {place}"
        if of_step.max() > TOKEN_NATS or of_step.mean() > max(STEP_NATS, TOKEN_NATS / len(of_step)):
            return f"{of_step.mean():.2g} nats apart {place}"
    places, sampled = seen.greedy.T
    if (seen.logprobs[places, sampled] < seen.logprobs[places].max(axis=1)).any():
        return f"sampled tokens that are not the most probable in {model}"
    if (equal := float((seen.drawn == expected["drawn"]).mean())) < EQUAL_DRAWS:
        return f"{equal:.0%} of draws are the same in {model}"
    return None


@cache
def _expected() -> dict[str, NDArray[np.generic]]:
    with resources.files(__package__).joinpath("expected.npz").open("rb") as file, np.load(file) as arrays:
        return dict(arrays)
