"""Kernels of mixtures: the choice of experts, and the mat-vec of pairs, tokens with one expert each. torch-free."""

from __future__ import annotations

from dataclasses import dataclass

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

EXPERT_SIZES = "pppppppppppp" + "iiiii" + "piff"
"""Of the kernel's parameters: weights, block scales, table, output, its terms, factors, biases, chosen experts, codes
and terms of the input, counts of experts read, bytes of an expert; strips of an expert, out_features, chunks, blocks of
a pair, pairs of an input; a folded norm's partial sums of squares, their number, inverse width and epsilon."""


def expert_source(weight_format: FragmentFormat, tiles: MatvecTiles, activation: GatedActivation | None) -> Source:
    """The kernel of `matvec.cu` for one pair at a time, its matrix that of the pair's expert.

    A block in x is a pair and some tiles. Pairs of expert -1 are left as they are. Where factors are null the expert is
    known only after the kernel before, so no weight is requested earlier; with factors the choice must be complete when
    that kernel lets the next one start.

    Args:
        tiles: of one token.
        activation: that of gate and up, interleaved: codes and terms of the next matrix are written, a row for each
            pair. None writes float32 sums, with biases unless those are null, times the pair's factor unless factors
            are null. With factors the experts that are read are counted.
    """
    name = f"expert_matvec_{format_name(weight_format)}{f'_{activation}' if activation else ''}"
    defines = format_defines(weight_format)
    parts = [define([*tiles.defines(), *epilogue_defines(activation)]), read("primitives.cu")]
    parts.extend(read(file) for file in epilogue_files("matvec", activation))
    parts.append(define(defines))
    parts.extend((read("weights.cu"), read("matvec.cu"), read("experts/matvec.cu")))
    entry = f'extern "C" __global__ void __launch_bounds__({tiles.threads}, {tiles.blocks})\n'
    return Source(name, "".join(parts).replace("KERNEL_ENTRY", f"{entry}{name}"))


CHOICE_SIZES = "pppppppppp" + "fif"
"""Of the parameters of the choice: weights, biases of scores and of ranks, scales of experts, stream, header, scores,
arrivals, chosen, factors; epsilon, whether factors are divided by their sum, their scale."""
CHOICE_WARPS = 8  # of a block: each has one expert
MOST_CHOSEN = MOST_GROUPS = 32  # experts of a token, and groups of experts, that one warp can choose


@dataclass(frozen=True, slots=True)
class ChoiceShape:
    """What a kernel of the choice depends on.

    Attributes:
        width: of the stream, a multiple of 4.
        experts: of a layer. per_token: experts of a token, up to MOST_CHOSEN.
        sigmoid: True scores by sigmoids, False by a softmax.
        selects: True if ranks have a bias.
        groups: of experts, up to MOST_GROUPS, of which a token chooses from `groups_per_token`.
    """

    width: int
    experts: int
    per_token: int
    sigmoid: bool = False
    selects: bool = False
    groups: int = 1
    groups_per_token: int = 1


def choice_source(choice: ChoiceShape) -> Source:
    """Scores and choices of experts for few tokens of a residual stream, through an RMSNorm."""
    numbers = {
        "WIDTH": choice.width, "EXPERTS": choice.experts, "PER_TOKEN": choice.per_token,
        "SIGMOID": int(choice.sigmoid), "SELECTS": int(choice.selects),
        "GROUPS": choice.groups, "GROUPS_PER_TOKEN": choice.groups_per_token,
    }  # fmt: skip
    name = "choose_experts_" + "_".join(map(str, numbers.values()))
    values = {**numbers, "WARPS": CHOICE_WARPS, "NAME": name}
    defines = define((key, str(value)) for key, value in values.items())
    return Source(name, defines + read("primitives.cu") + read("experts/choose.cu"))
