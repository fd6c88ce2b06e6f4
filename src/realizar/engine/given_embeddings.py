"""`prompt_embeddings` records embeddings that a request brings in place of those of its ids."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike

from realizar.errors import InvalidRequestError
from realizar.request import PromptEmbeddings

PLACEHOLDER = 0
"""The id under an embedding that no token stands for; in vocabularies of models whose layers have inputs of their own,
padding.
"""


def prompt_embeddings(values: ArrayLike, start: int = 0) -> PromptEmbeddings:
    """Record embeddings that come after `start` prompt tokens: numbers [tokens, hidden_size] that float32 can hold.

    The engine checks their width. InvalidRequestError: they are no such matrix, none, or some are not finite.
    """
    try:
        with np.errstate(over="ignore"):
            rows = np.ascontiguousarray(values, np.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(
            f"embeddings must be numbers [tokens, hidden_size]: {error}", "prompt_embeds"
        ) from error
    if rows.ndim != 2 or not rows.size:
        raise InvalidRequestError(
            f"embeddings must be numbers [tokens, hidden_size], not of shape {rows.shape}", "prompt_embeds"
        )
    wrong = ~np.isfinite(rows).all(axis=1)
    if wrong.any():
        raise InvalidRequestError(f"embedding {int(wrong.argmax())} is not finite", "prompt_embeds")
    digests = b"".join([hashlib.sha256(row.data).digest() for row in rows])
    return PromptEmbeddings(start, rows.tobytes(), digests)
