"""What a step's numbers of tokens and rows are padded to, so that kernels and graphs are few."""

from __future__ import annotations

from realizar.backends.cuda.step_arrays import StepSizes
from realizar.config import EngineConfig
from realizar.models.spec import ModelSpec

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_TOKEN_STEP = 64


def row_counts(most: int) -> list[int]:
    """What numbers of rows up to `most` are padded to, ascending; the last is `most`."""
    counts = [count for count in _ROWS if count < most]
    counts.extend(range(_ROWS[-1] + 64, most, 64))
    return [*counts, most]


def padded_rows(count: int, most: int) -> int:
    """The next of `row_counts`; 0 stays 0."""
    return next(padded for padded in row_counts(most) if padded >= count) if count else 0


def padded_tokens(count: int, most: int) -> int:
    """Tokens of a step with chunks of prompts: 16, 32, or whole 64s."""
    padded = next((size for size in (16, 32) if size >= count), -(-count // _TOKEN_STEP) * _TOKEN_STEP)
    return min(padded, most)


def token_counts(most: int) -> list[int]:
    """All that `padded_tokens` gives."""
    return sorted({padded_tokens(count, most) for count in [16, 32, *range(_TOKEN_STEP, most + 1, _TOKEN_STEP), most]})


def step_sizes(spec: ModelSpec, config: EngineConfig, context_length: int, tile_tokens: int) -> StepSizes:
    """The most that a step may have."""
    tokens = max(config.max_step_tokens, config.max_running)
    tokens = max(16, -(-tokens // 16) * 16)
    return StepSizes(
        tokens=tokens,
        rows=config.max_running,
        selected=max(config.max_running * (1 + config.speculative_tokens), 32),
        tiles=config.max_running + tokens // tile_tokens + 1,
        groups=len(spec.cache_groups()),
        blocks=-(-context_length // config.block_size) + 1,
        tile_tokens=tile_tokens,
    )
