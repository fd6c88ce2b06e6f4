"""Temperature and the truncations, on the few ids that are still candidates. numpy only.

Each truncation sees the distribution over the survivors of the one before, renormalised, and leaves at least one id.
Exponentials and sums are float64. Order between equally probable ids is by lower id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.sampler_select import largest, shortest_prefix

_SMALLEST_EXPONENT = -700.0  # exp of less counts as 0: near the end of float64, and no 24-bit draw could pick it


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ids that may still be chosen.

    Attributes:
        ids: intp [n], ascending.
        scaled: float64 [n], (logit - largest logit) / temperature.
        weights: float64 [n], exp(scaled): probabilities up to a factor.
    """

    ids: NDArray[np.intp]
    scaled: NDArray[np.float64]
    weights: NDArray[np.float64]

    def keep(self, which: NDArray[np.bool_]) -> Candidates:
        """Those that `which`, bool [n], marks."""
        return self if which.all() else Candidates(self.ids[which], self.scaled[which], self.weights[which])


def candidates(logits: NDArray[np.float32], temperature: float, top_n_sigma: float = 0.0, top_k: int = 0) -> Candidates:
    """Temperature, top-n-sigma and top-k, which need logits alone and so run before any exponential.

    Top-n-sigma (Tang et al., 2024) keeps logits within `top_n_sigma` population standard deviations, taken over all ids
    that are not forbidden, of the largest; 0 is off. Top-k keeps exactly k ids; 0 or less is off.

    Args:
        logits: float32 [vocab] without NaN or +inf, at least one finite; -inf forbids an id.
        temperature: above 0.
    """
    ids: NDArray[np.intp] | None = None
    values: NDArray[np.floating[Any]] = logits
    if 0 < top_k < logits.size:
        ids = largest(logits, top_k)
        values = logits[ids]
    maximum = np.float64(values.max())
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf, as it should
        scaled = (values - maximum) / temperature
    kept = scaled >= _SMALLEST_EXPONENT
    if top_n_sigma > 0.0:
        finite = logits[np.isfinite(logits)]
        kept &= values >= maximum - top_n_sigma * finite.std(dtype=np.float64)
    if not kept.all():
        places = np.flatnonzero(kept)
        ids, scaled = places if ids is None else ids[places], scaled[places]
    return Candidates(np.arange(logits.size) if ids is None else ids, scaled, np.exp(scaled))


def typical(these: Candidates, mass: float) -> Candidates:
    """Locally typical (Meister et al., 2023): the ids whose surprise is nearest the entropy, up to `mass`; 1 is off."""
    if mass >= 1.0:
        return these
    log_total = math.log(these.weights.sum())
    surprise = log_total - these.scaled
    entropy = float((these.weights * surprise).sum()) / float(these.weights.sum())
    return these.keep(shortest_prefix(np.abs(surprise - entropy), these.weights, mass))


def top_p(these: Candidates, mass: float) -> Candidates:
    """Nucleus (Holtzman et al., 2020): the most probable ids until their sum reaches `mass`; 1 is off."""
    return these if mass >= 1.0 else these.keep(shortest_prefix(-these.scaled, these.weights, mass))


def min_p(these: Candidates, share: float) -> Candidates:
    """Ids at least `share` times as probable as the most probable one; 0 is off."""
    return these if share <= 0.0 else these.keep(these.weights >= share * these.weights.max())


def exclude_top_choices(these: Candidates, threshold: float) -> Candidates:
    """XTC (p-e-w, 2024) once it acts: of the ids of probability `threshold` or more, only the least probable stays."""
    high = np.flatnonzero(these.weights >= threshold * these.weights.sum())
    if high.size < 2:
        return these
    scaled = these.scaled[high]
    least = high[np.flatnonzero(scaled == scaled.min())[-1]]
    kept = np.ones(these.ids.size, np.bool_)
    kept[high] = False
    kept[least] = True
    return these.keep(kept)


def within_surprise(these: Candidates, most_bits: float) -> Candidates:
    """Mirostat 2's cut (Basu et al., 2021): ids of a surprise of at most `most_bits`, or else the likeliest."""
    surprise = (math.log(these.weights.sum()) - these.scaled) / math.log(2.0)
    kept = surprise <= most_bits
    if not kept.any():
        kept[these.scaled.argmax()] = True
    return these.keep(kept)


def draw(these: Candidates, uniform: float) -> int:
    """Index of the first candidate, by id, whose cumulated share of the weight exceeds `uniform`, in [0, 1)."""
    cumulated = np.cumsum(these.weights)
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))
