"""The kinds of layers and caches that the CPU backend runs."""

from __future__ import annotations

from realizar.backends.supported import Feature, Supported
from realizar.cache_kinds import FullCache, WindowCache
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention, Experts, FeedForward

SUPPORTED = Supported(
    "the CPU backend",
    frozenset({Attention, SharedAttention}),
    frozenset({FeedForward, Experts}),
    frozenset({FullCache, WindowCache}),
    frozenset(Feature),  # all that there are
)
