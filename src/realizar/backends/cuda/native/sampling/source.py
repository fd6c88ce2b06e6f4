"""The sampler's kernels as two sources. Standard library only."""

from __future__ import annotations

from realizar.backends.cuda.native.compiler import Source, read
from realizar.sampling_params import SAMPLERS, Sampler

TILE, SPAN, BINS, ROOM = 4096, 16384, 2048, 4096  # as in rows.cu
MOST_LISTED = 4096  # most probable ids that `report_logprobs` can list
SELECT_BYTES = 8 * ROOM + 12 * BINS + 8 * 33 + 64  # `Room` of select.cu, with some to spare

_FILES = ("rows", "sampled", "adjust", "weigh", "gather", "select", "cut", "pick")
_FILES_OF_CUTS = ("rows", "weigh", "select", "cut")


def sampler_numbers() -> list[Sampler]:
    """The parameters that are float64 in a row's record, which come first."""
    return [each for each in SAMPLERS if each.kind is float]


def sampler_integers() -> list[Sampler]:
    """Those that are int32."""
    return [each for each in SAMPLERS if each.kind is int]


def sampling_sources() -> tuple[Source, Source]:
    """All kernels but `cut_ids`, and that one alone: it takes longer to compile than all others together."""
    fields = [f"double {', '.join(each.name for each in sampler_numbers())};"]
    fields.append(f"int {', '.join(each.name for each in sampler_integers())};")
    defined = f"#define SAMPLERS {' '.join(fields)}\n"
    parts = ("sampling", _FILES, 0), ("sampling_cuts", _FILES_OF_CUTS, 1)
    others, cuts = (
        Source(name, f"{defined}#define CUTS {number}\n" + "".join(read(f"sampling/{file}.cu") for file in files))
        for name, files, number in parts
    )
    return others, cuts
