"""The kinds of layers and caches that the CUDA backend runs."""

from __future__ import annotations

from realizar.backends.supported import Feature, Supported
from realizar.cache_kinds import FullCache, StateCache, WindowCache
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.spec import Attention, Experts, FeedForward

SUPPORTED = Supported(
    "the CUDA backend",
    frozenset({Attention, SharedAttention, GatedDeltaNet, ShortConvolution}),
    frozenset({FeedForward, Experts}),
    frozenset({FullCache, WindowCache, StateCache}),
    frozenset(
        {
            Feature.QUERY_GROWTH,
            Feature.ROUTER_BIAS,
            Feature.SIGMOID_ROUTER,
            Feature.SELECTION_BIAS,
            Feature.EXPERT_BIASES,
            Feature.CLAMPED_EXPERTS,
            Feature.EXPERT_GROUPS,
            Feature.SHARED_EXPERT,
            Feature.VALUE_NORM,
            Feature.OUTPUT_GATE,
            Feature.INPUT_GATE,
            Feature.OUTPUT_SCALE,
            Feature.EXPERT_SCALES,
            Feature.EXPERT_NORMS,
        }
    ),
)
