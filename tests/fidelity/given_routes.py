"""The specification's twin with given choices of experts, and how far an engine's logits are from it.

An engine's activations of eight bits move router scores a little; where two experts are nearly tied, another one is
chosen, and the token's logits become those of another function. So the twin goes the engine's way, and choices are
counted apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.models.spec import Experts, ModelSpec
from reference_model import Array, ReferenceModel

Choices = NDArray[np.int64]


@dataclass(frozen=True)
class Routes:
    """What an engine chose.

    Attributes:
        chosen: of each mixture, experts [tokens, experts per token].
        logits: of each mixture, the router's, biases added, float32 [tokens, experts]; empty where they are not known.
    """

    chosen: Sequence[Choices]
    logits: Sequence[NDArray[np.float32]] = ()


@dataclass(frozen=True)
class Distance:
    """How far an engine is from the twin.

    Attributes:
        kl: mean KL(twin || engine) in nats, the twin going the engine's way.
        choices: positions times mixtures. flipped: those of other experts than the twin chooses there.
        near: choices whose margin is below twice the largest error of a rank; None where the engine's are not known.
        flipped_apart: flipped ones that are not near: by no error of the engine's ranks.
    """

    kl: float
    choices: int
    flipped: int
    near: int | None
    flipped_apart: int | None


class GivenRoutes(ReferenceModel):
    """A model whose tokens go through given experts, in float32; it notes what it would have chosen.

    Args:
        chosen: of each mixture, [tokens, experts per token].
    """

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Array], chosen: Sequence[Choices]) -> None:
        super().__init__(spec, tensors)
        self._given = list(chosen)
        self.seen: list[tuple[Experts, Array, Choices]] = []
        """Of each mixture so far: its scores, and its own choices."""

    def _choose(self, part: Experts, scores: Array) -> Choices:
        given = self._given[len(self.seen)]
        self.seen.append((part, scores, super()._choose(part, scores)))
        return given

    def ranks(self, part: Experts, scores: Array) -> Array:
        """[tokens, experts] by which they are chosen, groups aside."""
        return scores if part.selection_bias is None else scores + self._tensors[part.selection_bias]


def distance(
    spec: ModelSpec, tensors: Mapping[str, Any], token_ids: Sequence[int], logits: NDArray[np.float32], routes: Routes
) -> Distance:
    """Compare an engine's logits [tokens, vocab_size] with the twin that goes its way."""
    twin = GivenRoutes(spec, tensors, routes.chosen)
    kl = mean_kl(twin.logits(token_ids), logits)
    flips = [
        (np.sort(own, axis=1) != np.sort(given, axis=1)).any(axis=1)
        for (_, _, own), given in zip(twin.seen, routes.chosen, strict=True)
    ]
    flipped = int(np.sum(flips))
    if not routes.logits:
        return Distance(kl, np.size(flips), flipped, None, None)
    nears = []
    for (part, scores, _), found in zip(twin.seen, routes.logits, strict=True):
        ranks = twin.ranks(part, scores)
        error = np.abs(twin.ranks(part, scores_of(part, found)) - ranks).max(axis=1)
        nears.append(margins(part, ranks) <= 2 * error)
    apart = int(np.sum(np.asarray(flips) & ~np.asarray(nears)))
    return Distance(kl, np.size(flips), flipped, int(np.sum(nears)), apart)


def mean_kl(exact: Array, other: Array) -> float:
    """KL(exact || other) in nats of logits [tokens, vocab_size], over the tokens."""
    p, q = (x - x.max(axis=1, keepdims=True) for x in (exact.astype(np.float64), other.astype(np.float64)))
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


def scores_of(part: Experts, logits: Array) -> Array:
    """Scores of experts by their logits."""
    if part.scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def margins(part: Experts, ranks: Array) -> Array:
    """[tokens]: how far each rank may move, in both directions together, before another expert or group is chosen."""
    found = np.full(len(ranks), np.inf)
    if part.num_groups > 1:
        grouped = np.sort(ranks.reshape(len(ranks), part.num_groups, -1), axis=-1)[..., -2:]
        sums, kept = grouped.sum(axis=-1), part.groups_per_token
        ordered = -np.sort(-sums, axis=1)
        found = (ordered[:, kept - 1] - ordered[:, kept]) / grouped.shape[-1]
        left = np.repeat(sums >= ordered[:, kept - 1 : kept], ranks.shape[1] // part.num_groups, axis=1)
        ranks = np.where(left, ranks, -np.inf)
    ordered, count = -np.sort(-ranks, axis=1), part.experts_per_token
    if count < ranks.shape[1]:
        found = np.minimum(found, ordered[:, count - 1] - ordered[:, count])
    return found
