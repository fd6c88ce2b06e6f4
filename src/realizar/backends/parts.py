"""Parts of a layer, by the names that profiles give them on every backend. numpy and the spec."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from realizar.backends.base import ForwardInput
from realizar.backends.program import (
    AttentionBlock,
    Block,
    ExpertsBlock,
    FeedForwardBlock,
    GatedDeltaNetBlock,
    InputGateBlock,
    SharedAttentionBlock,
    ShortConvolutionBlock,
)
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention

_NAMES: dict[type[Block], tuple[str, str, str]] = {
    AttentionBlock: ("attention", "qkv", "output"),
    SharedAttentionBlock: ("shared attention", "q", "output"),
    ShortConvolutionBlock: ("short convolution", "convolution inputs", "convolution output"),
    GatedDeltaNetBlock: ("gated delta net", "delta net inputs", "delta net output"),
    FeedForwardBlock: ("feed-forward", "gate and up", "down"),
    ExpertsBlock: ("experts", "router", "experts"),
    InputGateBlock: ("input gate", "input gate", "input projection"),
}
"""Of each block, of the matmuls of its inputs, and of its join."""
SHARED_PART = "shared expert"
"""All matmuls of an expert that every token goes through."""


@dataclass(frozen=True, slots=True)
class PartTime:
    """One operation of a step, run alone: the best of several times.

    Operations of one part share the name. `bytes_read` are of weights and KV cache; 0 where it reads neither.
    """

    part: str
    seconds: float
    bytes_read: int = 0


def block_name(block: Block) -> str:
    return _NAMES[type(block)][0]


def inputs_part(block: Block) -> str:
    return _NAMES[type(block)][1]


def join_part(block: Block) -> str:
    return _NAMES[type(block)][2]


def cached_tokens_read(attention: Attention | SharedAttention, step: ForwardInput) -> int:
    """Tokens whose keys and values a layer's attention reads at least once, over all rows of a step."""
    columns = step.columns
    seen = columns.num_context_tokens
    if attention.window is not None:
        seen = np.minimum(seen, attention.window + columns.num_tokens - 1)
    return int(seen[columns.num_tokens > 0].sum())
