"""`begun_ids`: the beginning of a constrained answer, where the conversation ends with it already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realizar.server.errors import refused
from realizar.tokenizer.tokenizer import Tokenizer

_MOST_ADDED = 4


def begun_ids(tokenizer: Tokenizer, last: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that spell the text of a message, from which an answer within a grammar goes on.

    They need not be the prompt's own: a grammar reads bytes.

    Raises:
        ApiError: 400; the text is in several parts, which a template may join in its own way, or the vocabulary has no
            ids for it alone.
    """
    content = last["content"]
    if isinstance(content, list):
        if len(content) > 1:
            raise refused("a message that a constrained answer goes on from must have one text", "messages")
        content = content[0]["text"]
    wanted = content.encode()
    for before in ("", "\n"):  # a vocabulary that puts a space before a text puts it before the line break
        ids = tokenizer.encode(before + content, add_special=False, parse_special=False)
        for num_added in range(_MOST_ADDED if before else 1):
            if b"".join(map(tokenizer.token_bytes, ids[num_added:])) == wanted:
                return tuple(ids[num_added:])
    raise refused("the vocabulary can't spell the text that a constrained answer goes on from", "messages")
