"""The sampler's kernels as one source. Standard library only."""

from __future__ import annotations

from realizar.backends.cuda.native.compiler import Source, read
from realizar.sampling_params import SAMPLERS, Sampler

TILE, SPAN, BINS, ROOM = 4096, 16384, 2048, 4096  # as in rows.cu
MOST_LISTED = 4096  # most probable ids that `report_logprobs` can list
SELECT_BYTES = 8 * ROOM + 12 * BINS + 8 * 33 + 64  # `Room` of select.cu, with some to spare

_FILES = ("rows", "sampled", "adjust", "weigh", "gather", "select", "cut", "pick")


def sampler_numbers() -> list[Sampler]:
    """The parameters that are float64 in a row's record, which come first."""
    return [each for each in SAMPLERS if each.kind is float]


def sampler_integers() -> list[Sampler]:
    """Those that are int32."""
    return [each for each in SAMPLERS if each.kind is int]


def sampling_source() -> Source:
    fields = [f"double {', '.join(each.name for each in sampler_numbers())};"]
    fields.append(f"int {', '.join(each.name for each in sampler_integers())};")
    defined = f"#define SAMPLERS {' '.join(fields)}\n"
    return Source("sampling", defined + "".join(read(f"sampling/{name}.cu") for name in _FILES))
