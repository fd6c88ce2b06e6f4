"""How many blocks of the KV cache a request takes, on any backend."""

from __future__ import annotations

from collections.abc import Iterable

from realizar.cache_kinds import attention_window
from realizar.config import EngineConfig
from realizar.errors import CapacityError
from realizar.models.spec import CacheGroup
from realizar.sizes import format_bytes


def blocks_per_request(groups: Iterable[CacheGroup], config: EngineConfig, context_length: int) -> list[int]:
    """Of each group, for a request of the whole context: no more than a window, where there is one, and a step.

    Raises:
        UnsupportedModelError: a group keeps no keys and values.
    """
    size, counts = config.block_size, []
    for group in groups:
        tokens = context_length
        window = attention_window(group.kind)
        if window is not None:
            tokens = min(tokens, window + config.max_step_tokens + size)
        counts.append(-(-tokens // size) + 1)
    return counts


def element_type(config: EngineConfig, automatic: str) -> str:
    """Of keys and values; `automatic` is what `auto` means."""
    return automatic if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def check_one_fits(request_bytes: int, limit_bytes: int, context_length: int) -> None:
    """Refuse where not even one request of the whole context fits.

    Raises:
        CapacityError: that is so.
    """
    if request_bytes > limit_bytes:
        raise CapacityError(
            f"the KV cache of one request of {context_length} tokens takes {format_bytes(request_bytes)} and"
            f" {format_bytes(limit_bytes)} may be used: lower the context length"
        )
