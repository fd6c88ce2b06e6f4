"""The kinds of layers that the CUDA backend runs."""

from __future__ import annotations

from realizar.backends.supported import Feature, Supported
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.spec import Attention, Experts, FeedForward

SUPPORTED = Supported(
    "the CUDA backend",
    frozenset({Attention, SharedAttention, GatedDeltaNet, ShortConvolution}),
    frozenset({FeedForward, Experts}),
    frozenset(Feature) - {Feature.UNGATED_EXPERTS, Feature.WIDE_DELTA_NET},
    adds_up=True,
)
