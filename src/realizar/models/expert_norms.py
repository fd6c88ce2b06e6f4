"""Norms of the parts of a mixture, each of which takes the residual stream by itself. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.models.parts import Norm


@dataclass(frozen=True, slots=True)
class ExpertNorms:
    """Norms of a mixture whose shared expert is the layer's dense feed-forward (Gemma 4).

    x is the residual stream itself, as the layer has no norm before such a mixture:

    scores are of router(norms.router(x)), and experts read norms.experts(x)
    output = norms.experts_output(sum over the chosen) + norms.shared_output(shared(norms.shared(x)))
    """

    router: Norm
    experts: Norm
    shared: Norm
    experts_output: Norm
    shared_output: Norm
