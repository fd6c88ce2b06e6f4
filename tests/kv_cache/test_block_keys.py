"""A key names everything that a block's contents depend on."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realizar.kv_cache.block_keys import BlockKeys
from realizar.request import DIGEST_BYTES, PromptEmbeddings


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


@given(
    runs=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3),
    size=st.integers(1, 7),
    flip=st.booleans(),
)
def test_embeddings_are_part_of_the_keys_from_their_block_on(
    runs: list[tuple[int, int]], size: int, flip: bool
) -> None:
    """By places and digests alone, however they are cut into runs; a key differs from the first that differs on."""
    at, ids = 0, np.zeros(24, np.int32)
    whole: list[PromptEmbeddings] = []
    for gap, count in runs:
        at = min(at + gap, 20)
        digests = b"".join([bytes([at + place]) * DIGEST_BYTES for place in range(min(count, 24 - at))])
        whole.append(PromptEmbeddings(at, b"", digests))
        at = whole[-1].end
    single = [
        PromptEmbeddings(run.start + place, b"", run.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])
        for run in whole
        for place in range(run.num_tokens)
    ]
    found = list(BlockKeys(size, None, whole).of(ids))
    assert found == list(BlockKeys(size, None, single).of(ids))
    if single:
        changed = PromptEmbeddings(single[-1].start, b"", b"x" * DIGEST_BYTES)
        others = [*single[:-1], *([changed] if flip else [])]  # another embedding, or that of the id
        same = single[-1].start // size
        different = list(BlockKeys(size, None, others).of(ids))
        assert different[:same] == found[:same]
        assert not set(different[same:]) & set(found[same:])


def test_what_differs_anywhere_before_differs_in_the_key() -> None:
    ids = list(range(12))
    histories = [ids, [99, *ids[1:]], [*ids[:5], 99, *ids[6:]], [*ids[:11], 99]]
    lasts = {
        BlockKeys(4, salt).of(np.array(history, np.int32))[-1] for history in histories for salt in (None, "", "a", "b")
    }
    assert len(lasts) == 16
