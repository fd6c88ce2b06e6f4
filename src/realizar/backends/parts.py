"""Parts of a layer, by the names that profiles give them on every backend, and of towers. numpy and the spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

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
from realizar.models.tower import Projector, Stretches

Grid = TypeVar("Grid", bound=Any)
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
RANK_SUMS = "sums of ranks"


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


def squares_of(patches: Grid, merge: int, projector: Projector) -> Grid:
    """Patches of a picture [rows, columns, width], numpy's or torch's, as squares, of merge ** 2 each: what a projector
    reads of them.
    """
    rows, columns, width = patches.shape
    grid: Any = patches.reshape(rows // merge, merge, columns // merge, merge, width)
    if projector.reads == "mean":
        read = grid.mean(axis=(1, 3))
    elif projector.reads == "channels":
        read = grid.swapaxes(1, 2).swapaxes(2, 4).swapaxes(3, 4)
    else:
        read = grid.swapaxes(1, 2)
    found: Grid = read.reshape(rows * columns // merge**2, -1)
    return found


def windows_of(rows: int, columns: int, edge: int | None) -> list[NDArray[np.intp]]:
    """The patches of each window of so many rows and columns of them, from the first on; None is one window of all."""
    at = np.arange(rows * columns).reshape(rows, columns)
    edge = edge or max(rows, columns)
    return [
        at[row : row + edge, column : column + edge].ravel()
        for row in range(0, rows, edge)
        for column in range(0, columns, edge)
    ]


def places_between(stretches: Stretches, count: int, side: int) -> NDArray[np.float32]:
    """Shares of `side` places in each of `count`, float32 [count, side]; see `Tower.stretches`.

    With the corners in place they are spread evenly from the first to the last; pixels are resized by triangles, wider
    where these are fewer; cubics go through four places, of which those beyond an edge are the one at the edge.
    """
    if stretches == "cubics":
        return _between_cubics(count, side)
    if stretches == "pixels":
        scale = np.float32(side / count)
        centres = (np.arange(count, dtype=np.float32)[:, None] + np.float32(0.5)) * scale - np.float32(0.5)
        distances = np.abs(np.arange(side, dtype=np.float32) - centres) / max(scale, np.float32(1))
        shares = np.maximum(1 - distances, 0).astype(np.float32)
        shares /= shares.sum(1, keepdims=True)
        return shares
    at = np.linspace(0, side - 1, count, dtype=np.float32)
    low = at.astype(np.int32)
    shares = np.zeros((count, side), np.float32)
    shares[np.arange(count), low] = 1 - (at - low)
    shares[np.arange(count), np.minimum(low + 1, side - 1)] += at - low
    return shares


def _between_cubics(count: int, side: int) -> NDArray[np.float32]:
    at = (np.arange(count) + 0.5) / count * side - 0.5
    low, shares, a = np.floor(at).astype(np.int32), np.zeros((count, side)), -0.75
    for offset in (-1, 0, 1, 2):
        d = np.abs(at - low - offset)
        near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * (d**3 - 5 * d**2 + 8 * d - 4)
        np.add.at(shares, (np.arange(count), np.clip(low + offset, 0, side - 1)), np.where(d <= 1, near, far))
    return shares.astype(np.float32)
