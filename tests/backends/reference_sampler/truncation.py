"""Temperature and the truncations. numpy only.

Each truncation sees the distribution over the survivors of the one before, renormalised, and leaves at least one id.
Exponentials and sums are float64; equally probable ids are ordered by lower id. Rows of a large vocabulary are read in
chunks that stay in the cache, and only ids that a truncation can keep are gathered: the others count in its sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backends.reference_sampler.select import largest, shortest_prefix
from realizar.sampling_params import SamplingParams

_CHUNK = 8192  # logits; in float64 they fit a first-level cache and are below malloc's threshold for fresh pages
_NO_WEIGHT = -700.0  # scaled logits from here down have weight 0: below lie denormals, a hundred times slower
_SMALLEST_WEIGHT = np.exp(np.float64(_NO_WEIGHT))
_SLACK = 1e-9  # by which a gathering bound, found through a logarithm, is lowered, so that rounding loses no id

FloatRow = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Ids that may still be sampled.

    Attributes:
        ids: intp [n], ascending.
        scaled: float64 [n], (logit - largest logit) / temperature.
        weights: float64 [n], exp(scaled), all above 0: probabilities up to a factor.
    """

    ids: NDArray[np.intp]
    scaled: NDArray[np.float64]
    weights: NDArray[np.float64]

    def keep(self, which: NDArray[np.bool_]) -> Candidates:
        """Those that `which`, bool [n], marks."""
        return Candidates(self.ids[which], self.scaled[which], self.weights[which])


def scale(logits: FloatRow, largest_logit: np.float64, temperature: float) -> NDArray[np.float64]:
    """(logit - largest) / temperature; -700 where it is less, as for forbidden ids."""
    with np.errstate(over="ignore"):
        return np.maximum((logits - largest_logit) / temperature, _NO_WEIGHT)


def weigh(scaled: NDArray[np.float64]) -> NDArray[np.float64]:
    """exp(scaled), and 0 at -700; the constant taken off is lost in the rounding of any weight that matters."""
    weights = np.exp(scaled)
    weights -= _SMALLEST_WEIGHT
    return weights


def scaled_chunks(logits: FloatRow, temperature: float) -> Iterator[NDArray[np.float64]]:
    """`scale` of a whole row, chunk by chunk."""
    top = np.float64(logits.max())
    return (scale(logits[at : at + _CHUNK], top, temperature) for at in range(0, logits.size, _CHUNK))


def chunk_weights(logits: FloatRow, temperature: float) -> NDArray[np.float64]:
    """Weight of each chunk of a row, float64 [chunks]."""
    return np.array([weigh(scaled).sum() for scaled in scaled_chunks(logits, temperature)])


def gather(logits: FloatRow, temperature: float, floor: float = _NO_WEIGHT) -> Candidates:
    """Candidates of any weight whose scaled logit is at least `floor`; some a little below it may come along."""
    top = np.float64(logits.max())
    bound = float(top) + max(floor, _NO_WEIGHT) * temperature
    bound -= 1e-6 * (abs(float(top)) + abs(bound))  # float32 comparisons round
    ids = np.flatnonzero(logits >= np.float32(max(bound, float(np.finfo(np.float32).min))))
    scaled = scale(logits[ids], top, temperature)
    these = Candidates(ids, scaled, weigh(scaled))
    return these if these.weights.all() else these.keep(these.weights > 0.0)


def restrict(logits: FloatRow, top_n_sigma: float, top_k: int) -> NDArray[np.intp] | None:
    """Ids, ascending, that top-n-sigma and top-k leave, or None for all. Neither depends on the temperature.

    Top-n-sigma (Tang et al., 2024) keeps logits within `top_n_sigma` population standard deviations, taken over all ids
    that are not forbidden, of the largest; 0 is off. Top-k keeps exactly k ids; 0 or less is off.
    """
    ids = largest(logits, top_k) if 0 < top_k < logits.size else None
    if top_n_sigma > 0.0:
        finite = logits[np.isfinite(logits)]
        limit = np.float64(logits.max()) - top_n_sigma * finite.std(dtype=np.float64)
        places = np.flatnonzero((logits if ids is None else logits[ids]) >= limit)
        ids = places if ids is None else ids[places]
    return ids


def typical(logits: FloatRow, temperature: float, mass: float) -> Candidates:
    """Locally typical (Meister et al., 2023): the ids whose surprise is nearest the entropy, until they hold `mass`."""
    total = moment = 0.0
    for scaled in scaled_chunks(logits, temperature):
        weights = weigh(scaled)
        total += float(weights.sum())
        moment += float((weights * scaled).sum())
    entropy = math.log(total) - moment / total
    # All ids of surprise above ln(size / (1 - mass)) hold less than 1 - mass together. That is above the entropy, so
    # where no likelier id is as far from it on the other side, they come last and are not reached.
    rarest = math.log(logits.size / max(1.0 - mass, 1e-16))
    reached = entropy - math.log(total) <= rarest - entropy
    these = gather(logits, temperature, math.log(total) - rarest - _SLACK if reached else _NO_WEIGHT)
    away = np.abs(math.log(total) - these.scaled - entropy)
    return these.keep(shortest_prefix(away, these.weights, mass * total))


def nucleus(logits: FloatRow, temperature: float, mass: float) -> Candidates:
    """Top-p (Holtzman et al., 2020): the most probable ids until they hold `mass`."""
    total = float(chunk_weights(logits, temperature).sum())
    # Ids of weight below (1 - mass) * total / size hold less than 1 - mass together: never part of the nucleus.
    these = gather(logits, temperature, math.log(max(1.0 - mass, 1e-16) * total / logits.size) - _SLACK)
    return these.keep(shortest_prefix(-these.scaled, these.weights, mass * total))


def top_p(these: Candidates, mass: float) -> Candidates:
    """`nucleus` of candidates that an earlier truncation left; 1 is off."""
    if mass >= 1.0:
        return these
    return these.keep(shortest_prefix(-these.scaled, these.weights, mass * float(these.weights.sum())))


def min_p(these: Candidates, share: float) -> Candidates:
    """Ids at least `share` times as probable as the most probable one; 0 is off."""
    return these if share <= 0.0 else these.keep(these.weights >= share * these.weights.max())


def truncate(logits: FloatRow, sampling: SamplingParams) -> Candidates:
    """Temperature, top-n-sigma, top-k, typical, top-p and min-p.

    Args:
        logits: float32 [vocab] without NaN or +inf, at least one finite; -inf forbids an id.
        sampling: of a temperature above 0.
    """
    ids = restrict(logits, sampling.top_n_sigma, sampling.top_k)
    row = logits if ids is None else logits[ids]
    if sampling.typical_p < 1.0:
        these = top_p(typical(row, sampling.temperature, sampling.typical_p), sampling.top_p)
    elif sampling.top_p < 1.0:
        these = nucleus(row, sampling.temperature, sampling.top_p)
    else:
        floor = math.log(sampling.min_p) - _SLACK if sampling.min_p > 0.0 else _NO_WEIGHT
        these = gather(row, sampling.temperature, floor)
    these = min_p(these, sampling.min_p)
    return these if ids is None else replace(these, ids=ids[these.ids])


def truncates(sampling: SamplingParams) -> bool:
    """True if `truncate` may remove an id."""
    masses = sampling.typical_p, sampling.top_p
    return sampling.top_n_sigma > 0.0 or sampling.top_k > 0 or min(masses) < 1.0 or sampling.min_p > 0.0


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


def within_surprise(logits: FloatRow, temperature: float, most_bits: float) -> Candidates:
    """Mirostat 2's cut (Basu et al., 2021): ids of a surprise of at most `most_bits`, or else the likeliest."""
    floor = math.log(float(chunk_weights(logits, temperature).sum())) - most_bits * math.log(2.0)
    these = gather(logits, temperature, min(floor, 0.0))
    kept = these.scaled >= floor
    if not kept.any():
        kept[these.scaled.argmax()] = True
    return these.keep(kept)


def draw(these: Candidates, uniform: float) -> int:
    """Index of the first candidate, by id, whose cumulated share of the weight exceeds `uniform`, in [0, 1)."""
    cumulated = np.cumsum(these.weights)
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))


def draw_untruncated(logits: FloatRow, temperature: float, uniform: float) -> int:
    """`draw` of a whole row, as an id: first the chunk is found, then the id within it."""
    ends = np.cumsum(chunk_weights(logits, temperature))
    target = uniform * ends[-1]
    chunk = int(np.searchsorted(ends, target, side="right"))
    part = logits[chunk * _CHUNK : (chunk + 1) * _CHUNK]
    cumulated = np.cumsum(weigh(scale(part, np.float64(logits.max()), temperature)))
    below = target - (ends[chunk - 1] if chunk else 0.0)
    index = int(np.searchsorted(cumulated, below, side="right"))
    # The chunk's two sums may differ in their last bits; then the target lies past its last id of any weight.
    return chunk * _CHUNK + min(index, int(np.searchsorted(cumulated, cumulated[-1])))
