"""Tiles of matmuls whose sums have one order, whatever the number of tokens: for `batch_invariant`. torch-free.

A matrix's columns are cut into splits by its shape alone, and every tile multiplies a split's columns in ascending
order into one accumulator. The consumer adds the splits in ascending order. So tiles may follow the number of tokens,
and a token's sums have the same bits in all of them, as long as one kind of instruction multiplies: wgmma's columns of
tokens do not see each other, nor do those of mma.sync, but the two round differently. Where few tokens leave time to
decode alone, several warpgroups take a split's stages in turn and hand the accumulator on, in the same order. Where
many tokens fill the device without splits, a block multiplies them all and adds them itself, as the consumer would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat
from realizar.backends.cuda.matmul.tuning_table import BLOCK_TOKENS, FEW_TOKENS, MANY_TOKENS, DeviceTuning, Tiling
from realizar.backends.cuda.native.sources import MmaSyncTiles, WgmmaTiles

_MOST_SPLITS, _LEAST_CHUNKS = 4, 8  # of a matrix's columns; chunks of a split
_FILLED = 2.0  # strips times splits that a multiprocessor should have with few tokens: one alone decodes too slowly
_LEAST_BLOCKS, _LEAST_GROUPS = 0.85, 1.8  # blocks and warpgroups of a multiprocessor, for a tile that is large enough
_RINGS = {
    FEW_TOKENS // 2: {(2, 2): (4, 2, 1), (2, 1): (6, 2, 1), (1, 1): (6, 2, 2)},
    FEW_TOKENS: {(2, 2): (4, 2, 1), (2, 1): (6, 2, 1), (1, 1): (4, 2, 2)},
    MANY_TOKENS: {(2, 2): (4, 1, 1), (1, 2): (3, 2, 1), (1, 1): (3, 2, 1)},
    BLOCK_TOKENS[-1]: {(1, 2): (3, 2, 1), (1, 1): (3, 2, 1)},
}
"""Stages, step and blocks of tiles by their strips and warpgroups, largest first, by a block's tokens, at most."""
_MOST_IN_TURN, _MOST_BY_THREE = 32, 16  # tokens of a block whose stages two warpgroups take in turn, or three
_LONG = 32  # chunks of a split, from which on three are worth their room
_SUMMED_STAGES = 3  # of the ring of a block that adds splits, whose sums take most of its shared memory
_EDGES = 1.2  # what a block of one split costs beside its matrix instructions, as a factor: its begin, end and sums


def fixed_splits(tuning: DeviceTuning, out_features: int, chunks: int) -> int:
    """Splits of a matrix's columns: enough that few tokens occupy the device, few enough for many."""
    wanted = max(1, round(_FILLED * tuning.processors / -(-out_features // BLOCK)))
    return max(1, min(1 << (wanted - 1).bit_length(), _MOST_SPLITS, chunks // _LEAST_CHUNKS))


def fixed_tiling(
    tuning: DeviceTuning, tokens: int, out_features: int, cols: int, weight_format: FragmentFormat,
    beside: Sequence[FragmentFormat] = (),
) -> Tiling:  # fmt: skip
    """The tiles of a step; splits times `tiles.summed` depend on the shape alone. The grid has formats `beside`."""
    chunks, block_tokens = weight_format.chunks(cols), tuning.block_tokens(tokens)
    splits = fixed_splits(tuning, out_features, chunks)
    if not tuning.wgmma:
        return Tiling(tuning.shrunk(MmaSyncTiles(block_tokens, 2, 4, 1), [weight_format]), splits)
    launched = -(-tokens // block_tokens) * splits
    rings = next(rings for most, rings in _RINGS.items() if block_tokens <= most)

    def fills(strips: int, groups: int) -> bool:
        """True if a tile leaves every multiprocessor something to do, and two warpgroups that decode."""
        count = -(-out_features // (BLOCK * strips * groups)) * launched / tuning.processors
        return count >= _LEAST_BLOCKS and count * groups >= _LEAST_GROUPS

    strips, groups = next((size for size in rings if fills(*size)), (1, 1))
    stages, step, blocks = rings[strips, groups]
    while step > 1 and chunks % (splits * step):  # a stage lies in one split
        step //= 2
    tiles = WgmmaTiles(block_tokens, strips, groups, stages, step, blocks)
    summing = replace(tiles, stages=_SUMMED_STAGES, summed=splits)
    if _is_summed(tuning, tokens, out_features, chunks, summing, (weight_format, *beside)):
        return Tiling(summing, 1)
    fits_at_once = -(-out_features // BLOCK) * launched <= blocks * tuning.processors
    if (strips, groups, step) == (1, 1, 2) and fits_at_once and not weight_format.is_float:
        tiles = replace(tiles, turns=_turns(block_tokens, chunks // splits))
    return Tiling(tuning.shrunk(tiles, [weight_format]), splits)


def _is_summed(
    tuning: DeviceTuning, tokens: int, out_features: int, chunks: int, tiles: WgmmaTiles,
    weight_formats: Sequence[FragmentFormat],
) -> bool:  # fmt: skip
    """True if blocks of the largest tiles may add their `tiles.summed` splits, and take no longer than one each."""
    is_largest = (tiles.tokens, tiles.strips, tiles.groups) == (128, 2, 2)
    if (
        not is_largest
        or tiles.summed == 1
        or chunks % (2 * tiles.summed)
        or tuning.shrunk(tiles, weight_formats) != tiles
    ):
        return False
    x, _, z = tiles.grid(out_features, 1, -(-tokens // tiles.tokens))
    rounds = x * z / tuning.processors
    return math.ceil(rounds) * tiles.summed <= _EDGES * math.ceil(rounds * tiles.summed)


def _turns(block_tokens: int, chunks: int) -> int:
    """Warpgroups that decode the chunks of a split in turn.

    More of them leave less room for blocks of the next kernel, which then can't start early: so none where not all
    blocks fit at once, and two where a split is short.
    """
    if block_tokens > _MOST_IN_TURN:
        return 1
    return 3 if chunks >= _LONG and block_tokens <= _MOST_BY_THREE else 2


def is_gated(tuning: DeviceTuning, out_features: int, cols: int, weight_format: FragmentFormat) -> bool:
    """True if a step of every number of tokens has a matmul with the gated epilogue."""
    return all(tuning.gated(tokens, out_features, cols, weight_format) is not None for tokens in BLOCK_TOKENS)
