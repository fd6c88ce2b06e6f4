"""Padded numbers of tokens and rows of a step, few of them, so that kernels and graphs are few."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.step_arrays import StepSizes
from realizar.backends.resolved_config import NOTHING_BESIDE, ResolvedConfig
from realizar.models.spec import ModelSpec

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_FEW = 4, 8, 16, 32
_TOKEN_STEP = 64
_COARSE_STEPS = ((1024, 128), (1536, 256), (2048, 128))
"""Of more tokens than 512, up to each: so few graphs more, and where a step takes the longest, little padding."""
_GRAPH_TOKENS = 2048  # with many more in a step the device is busy for longer than a slow host takes to launch it
FIRST_ROWS = 8
"""Rows of a server's first requests, whose kinds no load leaves for later."""
_FIRST_TOKENS = 64
_ASIDE_TOKENS = 2048  # of a chunk that is read aside: more of them are no faster a token
_GRAPH_CHUNKS = 16  # rows with chunks that a graph has room for, at least: a tile that is dead still costs a little


def row_counts(most: int) -> list[int]:
    """The padded numbers of rows up to `most`, ascending; the last is `most`."""
    counts = [count for count in _ROWS if count < most]
    counts.extend(range(_ROWS[-1] + 64, most, 64))
    return [*counts, most]


@cache
def padded_rows(count: int, most: int) -> int:
    """The smallest of `row_counts` that is no less than a count; 0 stays 0."""
    return next(padded for padded in row_counts(most) if padded >= count) if count else 0


def padded_tokens(count: int, most: int) -> int:
    """The padded number of tokens of a step with chunks: 4, 8, 16, 32, or a multiple of 64, 128 or 256.

    Few tokens are a row or two with drafts: matmuls of fewer than 16 read their weights sooner.
    """
    step = _TOKEN_STEP
    if count > 512:
        step = next((step for end, step in _COARSE_STEPS if count <= end), _TOKEN_STEP)
    padded = next((size for size in _FEW if size >= count), -(-count // step) * step)
    return min(padded, most)


def fused_tokens(count: int, sizes: StepSizes) -> int:
    """The padded number of tokens whose states a drafter makes of streams at once."""
    return padded_rows(count, sizes.rows) if count <= sizes.rows else padded_tokens(count, sizes.tokens)


def token_counts(most: int) -> list[int]:
    return sorted({padded_tokens(count, most) for count in [*_FEW, *range(_TOKEN_STEP, most + 1, _TOKEN_STEP), most]})


def chunk_kinds(sizes: StepSizes) -> list[StepKind]:
    """The kinds with chunks that have a graph: for each padded number of tokens a few numbers of decodes.

    Few, since each is run and captured at load: with 64 rows at most 54, with any number at most 71. A context is cut
    into fewer parts the more decodes there may be: marks lie at most 8 times apart, so that what runs as a kind with
    room to spare still occupies a good part of the device.
    """
    kinds = []
    for tokens in token_counts(min(_GRAPH_TOKENS, sizes.tokens)):
        most = min(tokens, sizes.rows)
        marks = (8,) if tokens <= 64 else (8, 64) if tokens <= 256 else (16, 64) if tokens <= 512 else (64,)
        tiles = min(sizes.tiles, tokens // sizes.tile_tokens + _GRAPH_CHUNKS)
        kinds += [StepKind(tokens, decodes, tiles) for decodes in (0, *(n for n in marks if n < most), most)]
    return kinds


def first_chunks(sizes: StepSizes) -> list[StepKind]:
    """A short step and the longest: what most prompts run through is compiled with them."""
    counts = sorted({padded_tokens(_FIRST_TOKENS, sizes.tokens), token_counts(sizes.tokens)[-1]})
    return [StepKind(tokens, 0, 1) for tokens in counts]


def mixed_kinds(sizes: StepSizes) -> list[StepKind]:
    """Every padded number of tokens of a step with chunks, with every number of decodes that it may run with."""
    counts = {0, *row_counts(sizes.rows)} | {kind.decodes for kind in chunk_kinds(sizes)}
    return [
        StepKind(tokens, decodes, 1)
        for tokens in token_counts(sizes.tokens)
        for decodes in sorted(counts)
        if decodes <= tokens
    ]


def least_holding(step: StepKind, kinds: Iterable[StepKind]) -> StepKind | None:
    """The kind with the fewest decodes that holds a step with chunks, among kinds of as many tokens."""
    holding = (
        kind
        for kind in kinds
        if kind.tokens == step.tokens and kind.decodes >= step.decodes and kind.tiles >= step.tiles > 0
    )
    return min(holding, key=lambda kind: (kind.decodes, kind.tiles), default=None)


def aside_sizes(spec: ModelSpec, config: ResolvedConfig, sizes: StepSizes, device: DeviceProfile) -> StepSizes | None:
    """Sizes of a chunk that is read aside; None where none is.

    Chunks and steps at once share weights, keys and values alone. So states and kept layers are left out, and blocks
    that a window has left, which are another row's before the chunk that reads them has ended; a drafter, which reads
    what its model does; weights that are decoded for a matmul, for they lie in one place; and ranks, which meet in one
    order. Shown on Hopper alone, of mixtures without shared experts.
    """
    is_alone = config.beside == NOTHING_BESIDE and config.kv_blocks is None and spec.share.ranks == 1
    fits = sizes.tokens >= _ASIDE_TOKENS and config.context_length > 2 * _ASIDE_TOKENS and sizes.rows > 1
    is_plain = not (sizes.recurrences or sizes.kept) and all(group.window is None for group in spec.cache_groups())
    mixtures = [one for _, one in spec.mixtures()]
    is_plain &= bool(mixtures) and all(one.shared is None for one in mixtures)
    runs = device.capability[0] == 9 and device.runs("matmuls") and config.graphs
    if not (is_alone and fits and is_plain and runs) or config.prompt_dtype != "f16" or config.batch_invariant:
        return None
    tiles = _ASIDE_TOKENS // sizes.tile_tokens + 1
    return replace(sizes, tokens=_ASIDE_TOKENS, rows=1, selected=1, tiles=tiles)


def step_sizes(spec: ModelSpec, config: ResolvedConfig, tile_tokens: int) -> StepSizes:
    tokens = max(config.max_step_tokens, config.max_running)
    tokens = max(16, -(-tokens // 16) * 16)
    return StepSizes(
        tokens=tokens,
        rows=config.max_running,
        selected=max(config.max_running * (1 + config.speculative_tokens), 32),
        tiles=config.max_running + tokens // tile_tokens + 1,
        groups=len(spec.cache_groups()),
        blocks=config.max_blocks,
        tile_tokens=tile_tokens,
        recurrences=bool(spec.state_layers()),
        kept=len(config.hidden_layers),
        drafts=config.speculative_tokens if config.beside != NOTHING_BESIDE else 0,
        length=config.context_length if any(each.rope and each.rope.axes for _, each in spec.all_attentions()) else 0,
        width=spec.hidden_size if spec.deepstack else 0,
        whole=any(each.sees_images_whole for each in (one for _, one in spec.all_attentions())),
    )
