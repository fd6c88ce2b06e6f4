"""The mat-vec of pairs: tokens, each with one of the experts that it goes through. numpy-free, torch-free."""

from __future__ import annotations

from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.native.compiler import Source, read
from realizar.backends.cuda.native.sources import (
    GatedActivation,
    MatvecTiles,
    define,
    epilogue_defines,
    epilogue_files,
    format_defines,
    format_name,
)

EXPERT_SIZES = "pppppppppp" + "iiiii" + "piff"
"""Of the kernel's parameters: weights, block scales, table, output, its terms, factors, chosen experts, codes and terms
of the input, bytes of an expert; strips of an expert, out_features, chunks, blocks of a pair, pairs of an input; a
folded norm's partial sums of squares, their number, inverse width and epsilon."""


def expert_source(weight_format: FragmentFormat, tiles: MatvecTiles, activation: GatedActivation | None) -> Source:
    """The kernel of `matvec.cu` for one pair at a time, its matrix that of the pair's expert.

    A block in x is a pair and some tiles. Pairs of expert -1 are left as they are. The expert is known only after the
    kernel before, so no weight is requested earlier.

    Args:
        tiles: of one token.
        activation: that of gate and up, interleaved: codes and terms of the next matrix are written, a row for each
            pair. None writes float32 sums times the pair's factor, or the sums where factors are null.
    """
    name = f"expert_matvec_{format_name(weight_format)}{f'_{activation}' if activation else ''}"
    defines = format_defines(weight_format)
    parts = [define([*tiles.defines(), *epilogue_defines(activation)]), read("primitives.cu")]
    parts.extend(read(file) for file in epilogue_files("matvec", activation))
    parts.append(define(defines))
    parts.extend((read("weights.cu"), read("matvec.cu"), read("experts/matvec.cu")))
    entry = f'extern "C" __global__ void __launch_bounds__({tiles.threads}, {tiles.blocks})\n'
    return Source(name, "".join(parts).replace("KERNEL_ENTRY", f"{entry}{name}"))
