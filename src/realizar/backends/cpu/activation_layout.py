"""Quantised activations: one 64-byte record per token and 32 columns, so that a group costs one cache line.

Records lie in blocks of as many tokens as share one pass over a weight tile (`width`), [blocks, groups, width, 64], so
that a tile reads them one after another: rows of one token each would lie a power of two apart and evict each other.

    bytes 0-31   int8 codes, round(x / scale)
    byte 32      float32 scale
    36           float32 scale * sum of the codes: what minima multiply
    40, 44, 48   int32 sum of the codes times -8, -16, -128: what codes with such an offset start from
    52, 56       int32 sum of each half (a group of 16) times -32
    60           int32 sum of the codes times -1

Sums are those of the codes, not of x: an offset or a minimum then cancels exactly against the codes' own error, which
is smaller than if the two used different roundings. They come multiplied, because a plain load that fills a vector
takes no arithmetic port, where the dot products are the limit; a shift of what was loaded takes two.
"""

from __future__ import annotations

GROUP = 32
"""Columns that share one activation scale: the activations of a record."""
RECORD_BYTES = 64


def record_offset(token: int, group: int, groups: int, width: int) -> int:
    """Bytes from the start of a buffer of `groups` groups a token to a record. Also compiled into kernels."""
    return ((token // width * groups + group) * width + token % width) * RECORD_BYTES


SCALE = 32
SCALED_SUM = 36
OFFSET_SUMS = {8: 40, 16: 44, 128: 48, 1: 60}  # byte of the sum of the codes times minus the key
HALF_OFFSET, HALF_SUMS = 32, (52, 56)
