"""Quantised activations: one 64-byte record per token and 32 columns, so that a group costs one cache line.

Records lie in blocks of as many tokens as share one pass over a weight tile (`width`), [blocks, groups, width, 64], so
that a tile reads them one after another: rows of one token each would lie a power of two apart and evict each other.

    bytes 0-31   int8 codes, round(x / scale)
    byte 32      float32 scale
    36           float32 scale * sum of the codes: what minima multiply
    40           int32 -(sum of the codes); 44 and 48 the same of each half (groups of 16)
    52, 56       float32 scale * sum, of each half

Sums are those of the codes, not of x: an offset or a minimum then cancels exactly against the codes' own error, which
is smaller than if the two used different roundings.
"""

from __future__ import annotations

RECORD_BYTES = 64


def record_offset(token: int, group: int, groups: int, width: int) -> int:
    """Bytes from the start of a buffer of `groups` groups a token to a record. Also compiled into kernels."""
    return ((token // width * groups + group) * width + token % width) * RECORD_BYTES


SCALE = 32
SCALED_SUM = 36
NEGATIVE_SUM = 40
NEGATIVE_HALVES = (44, 48)
SCALED_HALVES = (52, 56)
