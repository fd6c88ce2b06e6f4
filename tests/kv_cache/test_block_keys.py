"""A key names everything that a block's contents depend on."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realizar.kv_cache.block_keys import BlockKeys


@given(ids=st.lists(st.integers(0, 2**31 - 1), max_size=40), size=st.integers(1, 7), step=st.integers(1, 9))
def test_keys_are_a_chain_of_sha256(ids: list[int], size: int, step: int) -> None:
    """However the history grows; ids as little-endian int32."""
    keys, wanted = BlockKeys(size, None), []
    parent = hashlib.sha256(b"").digest()
    for start in range(0, len(ids) - size + 1, size):
        part = b"".join(token_id.to_bytes(4, "little") for token_id in ids[start : start + size])
        parent = hashlib.sha256(parent + part).digest()
        wanted.append(parent)
    for end in range(0, len(ids) + step, step):
        known = ids[:end]
        assert list(keys.of(np.array(known, np.int32))) == wanted[: len(known) // size]


def test_what_differs_anywhere_before_differs_in_the_key() -> None:
    ids = list(range(12))
    histories = [ids, [99, *ids[1:]], [*ids[:5], 99, *ids[6:]], [*ids[:11], 99]]
    lasts = {
        BlockKeys(4, salt).of(np.array(history, np.int32))[-1] for history in histories for salt in (None, "", "a", "b")
    }
    assert len(lasts) == 16
