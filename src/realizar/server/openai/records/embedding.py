"""The record of `/v1/embeddings`."""

from __future__ import annotations

import msgspec


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. `input` is a text, token ids, or a list of either."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
