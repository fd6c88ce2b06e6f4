"""`BlockKeys`: names for the contents of a sequence's full blocks. numpy only.

A block's KV depends on its tokens, on all tokens before them, and on whatever else the request brings. Its key is
SHA-256 over the key of the block before, its own token ids, and offset and digest of each embedding that the request
brings for one of them; the first block follows a key of the salt. No two histories with one key can be made, so that a
hit never shows one client the contents of another's block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.request import DIGEST_BYTES, PromptEmbeddings


class BlockKeys:
    """Keys of the full blocks of one growing history.

    `context` is what a block's contents or its sharing depend on beside the tokens: the salt.
    """

    def __init__(
        self, block_size: int, context: str | None, embeddings: Sequence[PromptEmbeddings] = ()
    ) -> None:  # fmt: skip
        self._block_size, self._embeddings = block_size, embeddings
        self._root = hashlib.sha256(
            b"" if context is None else b"salt " + context.encode("utf-8", "surrogatepass")
        ).digest()
        self._keys: list[bytes] = []

    def of(self, token_ids: NDArray[np.int32]) -> Sequence[bytes]:
        """Keys of full blocks, 32 bytes each, not to be changed; `token_ids` begin with those of earlier calls."""
        size = self._block_size
        while (len(self._keys) + 1) * size <= len(token_ids):
            start = len(self._keys) * size
            parent = self._keys[-1] if self._keys else self._root
            given = b"".join([_given(run, start, start + size) for run in self._embeddings])
            self._keys.append(hashlib.sha256(parent + token_ids[start : start + size].tobytes() + given).digest())
        return self._keys


def _given(run: PromptEmbeddings, start: int, end: int) -> bytes:
    at = range(max(run.start, start), min(run.end, end))
    offsets = [(token - start, (token - run.start) * DIGEST_BYTES) for token in at]
    return b"".join(
        [offset.to_bytes(4, "little") + run.digests[first : first + DIGEST_BYTES] for offset, first in offsets]
    )
