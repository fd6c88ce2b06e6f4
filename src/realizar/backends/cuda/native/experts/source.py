"""Kernels of mixtures: the choice of experts, and the mat-vec of pairs, tokens with one expert each. torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from realizar.backends.cuda.layouts.fragments import FragmentFormat
from realizar.backends.cuda.native.compiler import Source, read
from realizar.backends.cuda.native.sources import (
    Defines,
    Epilogue,
    GatedActivation,
    MatvecTiles,
    define,
    epilogue_defines,
    epilogue_files,
    format_defines,
    format_name,
    of_fields,
)

EXPERT_SIZES = "pppppppppppp" + "iiiii" + "piff"
"""Of the kernel's parameters: weights, block scales, table, output, its terms, factors, biases, chosen experts, codes
and terms of the input, counts of experts read, bytes of an expert; strips of an expert, out_features, chunks, blocks of
a pair, pairs of an input; a folded norm's partial sums of squares, their number, inverse width and epsilon."""


@cache
def expert_source(weight_format: FragmentFormat, tiles: MatvecTiles, activation: GatedActivation | None) -> Source:
    """The kernel of `matvec.cu` for one pair at a time, its matrix that of the pair's expert; `tiles` are of one token.

    A block in x is a pair and some tiles. Pairs of expert -1 are left as they are. Where factors are null the expert is
    known only after the kernel before, so no weight is requested earlier; with factors the choice must be complete when
    that kernel lets the next one start, and the experts that are read are counted.

    An activation is that of gate and up, interleaved: codes and terms of the next matrix are written, a row for each
    pair. None writes float32 sums, with biases unless those are null, times the pair's factor unless factors are null.
    """
    name = f"expert_matvec_{format_name(weight_format)}{f'_{activation}' if activation else ''}"
    return _matvec(name, weight_format, tiles, activation, {}, "experts/matvec.cu")


EXPERT_SUM_SIZES = "ppppppppppp" + "iiii" + "fppppi"
"""Of the kernel's parameters: weights, block scales, table, stream, biases, factors, chosen experts, codes and terms of
the input, counts of experts read, bytes of an expert; strips of one, out_features, chunks, blocks of a token; the scale
of what is added, the next norm's weight, its codes, terms and partial sums of squares, and their number."""


@cache
def expert_sums_source(weight_format: FragmentFormat, tiles: MatvecTiles, per_token: int) -> Source:
    """The mat-vec of all experts of a token, which adds their weighted sum to the stream; `matvec_sums.cu`.

    A block in x is a token and some tiles. Otherwise as the residual-add epilogue of `matmul_source`. The tiles are of
    one token, their parts a multiple of `per_token`.
    """
    name = f"expert_sums_{format_name(weight_format)}_{per_token}"
    pairs: Defines = {"PAIRS": per_token, "PAIR_PARTS": tiles.parts // per_token}
    return _matvec(name, weight_format, tiles, "residual", pairs, "experts/matvec_sums.cu")


def _matvec(
    name: str, weight_format: FragmentFormat, tiles: MatvecTiles, epilogue: Epilogue | None, own: Defines, file: str
) -> Source:
    parts = [define(tiles.defines() | epilogue_defines(epilogue) | own), read("primitives.cu")]
    parts.extend(map(read, epilogue_files("matvec", epilogue)))
    parts.append(define(format_defines(weight_format)))
    parts.extend(map(read, ("weights.cu", "matvec.cu", "experts/pairs.cu", file)))
    entry = f'extern "C" __global__ void __launch_bounds__({tiles.threads}, {tiles.blocks})\n'
    return Source(name, "".join(parts).replace("KERNEL_ENTRY", f"{entry}{name}"))


CHOICE_SIZES = "pppppppppp" + "fif"
"""Of the parameters of the choice: weights, biases of scores and of ranks, scales of experts, stream, header, scores,
arrivals, chosen, factors; epsilon, whether factors are divided by their sum, their scale."""
MANY_SIZES = "ppppppppp" + "fifi" + "p"
"""The same of the choice for many tokens, without arrivals, then the number of tokens, and the shared expert's gate."""
MOST_CHOSEN = MOST_GROUPS = 32  # experts of a token, and groups of experts, that one warp can choose
CLUSTER_BLOCKS, MANY_WARPS = 8, 8  # of a cluster; of a block of the choice for many tokens
_MOST_AHEAD = 8  # units of 16 columns and of 16 experts whose weights a warp there asks for at once
_DYNAMIC_BYTES = 92 << 10  # of a block, on any card with clusters


@dataclass(frozen=True, slots=True)
class ChoiceShape:
    """The parameters that a kernel of the choice is compiled for.

    Attributes:
        width: of the stream, a multiple of 4.
        experts: of a layer. per_token: experts of a token, up to MOST_CHOSEN.
        sigmoid: scores by sigmoids, else by a softmax.
        selects: ranks have a bias.
        groups: of experts, up to MOST_GROUPS, of which a token chooses from `groups_per_token`.
        shared: 1 if every token goes through one expert more, whose number is that of the others; 2 if by the weight
            that a gate gives it; else 0.
    """

    width: int
    experts: int
    per_token: int
    sigmoid: bool = False
    selects: bool = False
    groups: int = 1
    groups_per_token: int = 1
    shared: int = 0

    @property
    def rows(self) -> int:
        """Of the router, the shared expert's gate among them."""
        return self.experts + (self.shared == 2)

    def warps(self, clusters: bool) -> int:
        """Warps of a block, a row each, for few tokens: as few as let a token's blocks be a cluster."""
        return 16 if clusters and CLUSTER_BLOCKS * 8 < self.rows <= CLUSTER_BLOCKS * 16 else 8

    def cluster(self, clusters: bool) -> int:
        """Blocks of a token's cluster, for few tokens; 0 where its blocks are none."""
        blocks = -(-self.rows // self.warps(clusters))
        return blocks if clusters and blocks <= CLUSTER_BLOCKS else 0

    @property
    def padded_experts(self) -> int:
        """Rows of the router, for many tokens: a power of two of tiles."""
        return 32 << max(0, (-(-self.experts // 32) - 1).bit_length())

    @property
    def _column_warps(self) -> int:
        """Warps of a block with the same experts, for many tokens."""
        return MANY_WARPS // min(MANY_WARPS, self.padded_experts // 16)

    @property
    def _turns(self) -> tuple[int, int]:
        """How often a warp asks for weights, for many tokens, and for how many units of 16 columns each time."""
        units = -(-self.width // (CLUSTER_BLOCKS * self._column_warps * 16))
        turns = -(-units // (_MOST_AHEAD if self.padded_experts <= 128 else _MOST_AHEAD // 2))
        return turns, -(-units // turns)

    @property
    def units(self) -> int:
        """Units of 16 columns of a block's part of the router, for many tokens."""
        turns, ahead = self._turns
        return turns * ahead * self._column_warps

    def has_many(self, tokens: int) -> bool:
        """True if the kernel for many tokens can have clusters of so many."""
        return self.padded_experts <= 256 and 4 * self.many_floats(tokens) <= _DYNAMIC_BYTES

    def many_floats(self, tokens: int) -> int:
        """float32 of its dynamic shared memory: columns of the stream, sums of warps and of blocks."""
        stride = self.units * 16 + (0 if self.units % 2 else 16)
        own = -(-tokens // CLUSTER_BLOCKS)  # for which a block chooses
        sums = self._column_warps * tokens * (self.padded_experts + 4) + CLUSTER_BLOCKS * own * self.padded_experts
        return tokens * stride + sums

    def many_defines(self, tokens: int) -> Defines:
        """Macros that the source for many tokens takes beside the fields; `tokens`: of a cluster."""
        return {
            "TOKENS": tokens, "PADDED": self.padded_experts, "UNITS": self.units, "AHEAD": self._turns[1],
            "FLOATS": self.many_floats(tokens), "CHOOSERS": -(-tokens // CLUSTER_BLOCKS),
        }  # fmt: skip


@cache
def choice_source(choice: ChoiceShape, clusters: bool) -> Source:
    """Scores and choices of experts for few tokens of a residual stream, through an RMSNorm."""
    own: Defines = {"WARPS": choice.warps(clusters), "CLUSTER": choice.cluster(clusters), "CHOOSERS": 1}
    files = ("experts/clusters.cu",) if own["CLUSTER"] else ()
    return _choice("choose_experts", choice, own, (*files, "experts/choice.cu", "experts/choose.cu"))


@cache
def many_choices_source(choice: ChoiceShape, tokens: int) -> Source:
    """The same for many tokens, on devices with clusters of blocks; `tokens`: of a cluster."""
    files = ("experts/clusters.cu", "experts/choice.cu", "experts/choose_many.cu")
    own, shared = choice.many_defines(tokens), 4 * choice.many_floats(tokens)
    return _choice(f"choose_experts_of_{tokens}", choice, own, files, shared)


def _choice(kind: str, choice: ChoiceShape, own: Defines, files: Sequence[str], shared_bytes: int = 0) -> Source:
    numbers = of_fields(choice)
    name = f"{kind}_" + "_".join(map(str, numbers.values()))
    return Source(
        name, define(numbers | own | {"NAME": name}) + read("primitives.cu") + "".join(map(read, files)), shared_bytes
    )
