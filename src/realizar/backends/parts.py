"""Parts of a layer, by the names that profiles give them on every backend. Standard library and the spec."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.base import ForwardInput
from realizar.backends.program import (
    AttentionBlock,
    Block,
    ExpertsBlock,
    FeedForwardBlock,
    ShortConvolutionBlock,
)
from realizar.models.spec import Attention

_NAMES: dict[type[Block], str] = {
    AttentionBlock: "attention",
    ShortConvolutionBlock: "short convolution",
    FeedForwardBlock: "feed-forward",
    ExpertsBlock: "experts",
}
SHARED_PART = "shared expert"
"""All matmuls of an expert that every token goes through."""


@dataclass(frozen=True, slots=True)
class PartTime:
    """One operation of a step, run alone.

    Attributes:
        part: what it does; operations of one part share the name.
        seconds: the best of several.
        bytes_read: of weights and KV cache that it must read from memory; 0 where it reads neither.
    """

    part: str
    seconds: float
    bytes_read: int = 0


def block_name(block: Block) -> str:
    """The name of a block in traces."""
    return _NAMES[type(block)]


def inputs_part(block: AttentionBlock | FeedForwardBlock | ExpertsBlock) -> str:
    """The matmul with which a block begins."""
    if isinstance(block, ExpertsBlock):
        return "router"
    return "qkv" if isinstance(block, AttentionBlock) else "gate and up"


def join_part(block: AttentionBlock | FeedForwardBlock) -> str:
    """The matmul with which a block ends."""
    return "output" if isinstance(block, AttentionBlock) else "down"


def cached_tokens_read(attention: Attention, step: ForwardInput) -> int:
    """Tokens whose keys and values a layer's attention reads at least once, over all rows of a step."""
    total = 0
    for row in step.rows:
        seen = row.num_context_tokens
        if attention.window is not None:
            seen = min(seen, attention.window + row.num_tokens - 1)
        total += seen if row.num_tokens else 0
    return total
