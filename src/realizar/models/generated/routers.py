"""Routers of random weights by which tokens choose some experts more often than others, by a Zipf law. numpy."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_MOST = 0.45
"""A router without a bias has as many logits below zero as above, so that fewer than half of all tokens can choose an
expert by its weights alone."""


def shares(experts: int, per_token: int, skew: float) -> NDArray[np.float64]:
    """The share of tokens that each expert is for, the first the most: float64 [experts], whose sum is `per_token`.

    Proportional to `(1 + index) ** -skew`, but no share is above 0.45, and what is cut is for the others.
    """
    law = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    cut = np.zeros(experts, bool)
    while True:
        wanted = np.where(cut, _MOST, 0.0)
        wanted[~cut] = (per_token - wanted.sum()) * law[~cut] / law[~cut].sum()
        if not (wanted[~cut] > _MOST).any():
            return wanted
        cut |= wanted > _MOST


def router_weights(experts: int, per_token: int, hidden: int, skew: float, state: list[int]) -> NDArray[np.float32]:
    """float32 [experts, hidden]. With a skew, an expert's logits spread as far as its share of tokens asks for.

    A token chooses the experts whose logits are above some threshold. Logits of normed tokens are normal, so an expert
    is above a threshold of 1 in a share p of tokens if their standard deviation is 1 / (quantile of 1 - p). Where more
    than 0.45 of all experts are for a token, there is no room to prefer any, and none is preferred.
    """
    rng = np.random.default_rng(state)
    weights = rng.standard_normal((experts, hidden), dtype=np.float32) * np.float32(hidden**-0.5)
    if skew and per_token < _MOST * experts:
        normal = NormalDist()
        scales = [1 / normal.inv_cdf(1 - share) for share in shares(experts, per_token, skew)]
        weights *= rng.permutation(np.array(scales, np.float32))[:, None]
    return weights
