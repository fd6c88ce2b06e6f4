"""`prompt_keys` names the blocks of a prompt as the engines report them."""

from __future__ import annotations

import numpy as np

from realizar.kv_cache.block_keys import KEY_BYTES, BlockKeys, CacheChanges
from realizar.replicas.routing import KeyChanges, KeyReport
from realizar.request import Request

_MOST_BLOCKS = 4096  # beyond them a replica is far ahead in any case, and the event loop waits for every key


def prompt_keys(request: Request, block_tokens: int) -> tuple[bytes, ...]:
    """Keys of the full blocks of a request's prompt, with its salt and embeddings; of a very long prompt, of its start.

    `block_tokens` are of a block of the prefix cache; 0 without one, and then there are no keys.
    """
    if not block_tokens:
        return ()
    token_ids = np.array(request.prompt_token_ids[: _MOST_BLOCKS * block_tokens], np.int32)
    keys = BlockKeys(block_tokens, request.cache_salt, request.embeddings)
    return tuple([key[:KEY_BYTES] for key in keys.of(token_ids)])


def report_of(changes: CacheChanges, incarnation: int, number: int, key_bytes: int = KEY_BYTES) -> KeyReport:
    """An engine's report. `key_bytes` are those that are kept of each key."""

    def keys(column: bytes) -> list[bytes]:
        return [column[start : start + key_bytes] for start in range(0, len(column), KEY_BYTES)]

    ends = None
    if changes.ends_added is not None:
        ends = KeyChanges(keys(changes.ends_added), keys(changes.ends_removed))
    return KeyReport(
        incarnation, number, KeyChanges(keys(changes.added), keys(changes.removed)), ends, changes.complete
    )
