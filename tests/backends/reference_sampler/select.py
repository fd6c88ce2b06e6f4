"""Selections without a full sort: the k largest, and the shortest prefix that holds enough weight. numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GROUP = 64  # elements whose maximum stands for them in the pre-filter of `largest`
_BINS = 4096  # of the histogram in `shortest_prefix`
_SORT_BELOW = 2 * _BINS  # sizes that a plain sort handles faster than the histogram


def largest(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.intp]:
    """Indices, ascending, of the `count` largest values; among equal ones the lower indices win. No NaN.

    The count-th largest of the maxima of disjoint groups is a lower bound on the count-th largest value, so only values
    that reach it need be looked at; they contain the answer whatever the values are.
    """
    if count >= values.size:
        return np.arange(values.size)
    columns = values.size // _GROUP
    pool = None
    if count <= columns // 2:
        maxima = values[: _GROUP * columns].reshape(_GROUP, columns).max(axis=0)
        pool = np.flatnonzero(values >= np.partition(maxima, columns - count)[columns - count])
        values = values[pool]
    limit = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > limit)
    ties = np.flatnonzero(values == limit)[: count - above.size]
    chosen = np.sort(np.concatenate((above, ties)))
    return chosen if pool is None else pool[chosen]


def largest_ordered(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.intp]:
    """`largest`, best first; among equal values the lower index comes first."""
    chosen = largest(values, count)
    return chosen[np.argsort(-values[chosen], kind="stable")]


def shortest_prefix(keys: NDArray[np.float64], weights: NDArray[np.float64], target: float) -> NDArray[np.bool_]:
    """The elements of the shortest prefix, by (key, index), whose weight reaches `target`; all if none does.

    At least one element is in it. Keys are finite. A histogram over the keys finds the one bin in which the target is
    reached; only that bin is sorted.
    """
    low, high = float(keys.min()), float(keys.max())
    if keys.size > _SORT_BELOW and high - low > 1e-9:
        bins = ((keys - low) * (_BINS / (high - low))).astype(np.intp)
        mass = np.cumsum(np.bincount(bins, weights=weights))
        crossing = min(int(np.searchsorted(mass, target)), mass.size - 1)
        kept = bins < crossing
        pool = np.flatnonzero(bins == crossing)
        if crossing:
            target -= float(mass[crossing - 1])
    else:
        kept = np.zeros(keys.size, np.bool_)
        pool = np.arange(keys.size)
    order = pool[np.argsort(keys[pool], kind="stable")]
    count = int(np.searchsorted(np.cumsum(weights[order]), target)) + 1
    kept[order[:count]] = True
    return kept
