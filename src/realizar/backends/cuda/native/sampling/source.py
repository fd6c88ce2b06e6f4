"""The sampler's kernels as one source. Standard library only."""

from __future__ import annotations

from realizar.backends.cuda.native.compiler import Source, read

TILE, SPAN, BINS, ROOM = 4096, 16384, 2048, 4096  # as in rows.cu
MOST_LISTED = 4096  # most probable ids that `report_logprobs` can list
SELECT_BYTES = 8 * ROOM + 12 * BINS + 8 * 33 + 64  # `Room` of select.cu, with some to spare

_FILES = ("rows", "choices", "adjust", "weigh", "gather", "select", "cut", "pick")


def sampling_source() -> Source:
    """All kernels of the sampler, for any model."""
    return Source("sampling", "".join(read(f"sampling/{name}.cu") for name in _FILES))
