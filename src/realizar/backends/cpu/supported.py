"""The kinds of layers that the CPU backend runs."""

from __future__ import annotations

from realizar.backends.supported import Feature, Supported
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.spec import Attention, Experts, FeedForward

SUPPORTED = Supported(
    "the CPU backend",
    frozenset({Attention, SharedAttention, ShortConvolution, GatedDeltaNet}),
    frozenset({FeedForward, Experts}),
    frozenset(Feature),  # all that there are
    adds_up=True,
)
