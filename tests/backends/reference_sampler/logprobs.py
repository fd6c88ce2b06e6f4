"""Log-probabilities of the model's own distribution, for sampled tokens and for prompt scoring. numpy only."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from backends.reference_sampler.select import largest_ordered
from realizar.backends.row_faults import unusable_logits
from realizar.outputs import TokenLogprobs

_CHUNK = 8192  # logits at a time, so that intermediate values stay in the cache


def log_normaliser(logits: NDArray[np.float32]) -> float:
    """log(sum(exp(logits))): exponentials in float32 below the maximum, their sum in float64.

    Raises:
        RealizarError: a logit is NaN or +inf, or all are -inf.
    """
    maximum = logits.max()
    if not np.isfinite(maximum):
        raise unusable_logits()
    total = 0.0
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, logits.size, _CHUNK):
            total += float(np.exp(logits[start : start + _CHUNK] - maximum).sum(dtype=np.float64))
    return float(maximum) + math.log(total)


def token_logprobs(logits: NDArray[np.float32], token_id: int | None, top_n: int) -> TokenLogprobs:
    """Log-probability and rank of one id, and the `top_n` most probable ids, best first, equal ones by lower id.

    Args:
        logits: float32 [vocab], as the model gave them.
        token_id: the id; None takes the most probable one.
        top_n: how many of the most probable ids, at most the vocabulary.

    Ranks follow the order of the top list: 1 + larger logits + equal logits of lower ids.

    Raises:
        RealizarError: a logit is NaN or +inf, or all are -inf.
    """
    normaliser = log_normaliser(logits)
    found = int(logits.argmax()) if token_id is None else token_id
    value = logits[found]
    rank = 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:found] == value))
    ids = largest_ordered(logits, top_n) if top_n > 0 else ()
    top = tuple((int(i), float(logits[i]) - normaliser) for i in ids)
    return TokenLogprobs(found, float(value) - normaliser, rank, top)
