"""Log-probabilities in the formats of the two endpoints.

A token whose bytes are not valid UTF-8 is named `bytes:\\xe2\\x80`, so that different tokens have different names. A
request may ask for `token_id:N` instead.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from realizar.outputs import TokenLogprobs
from realizar.server.protocol.answers import ChatLogprob, ChatLogprobs, ChatTopLogprob, CompletionLogprobs
from realizar.tokenizer.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")
_LOWEST = -9999.0  # stands for minus infinity, which JSON lacks: an impossible token


class TokenNames:
    """Names of tokens in answers. Args: as_ids: names are `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._data_of = tokenizer.spelled_bytes.__getitem__

    def name(self, token_id: int) -> str:
        """A token's name."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._data_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token_id: int) -> list[int]:
        """A token's bytes as numbers."""
        return list(self._data_of(token_id))

    def text_bytes(self, token_id: int, *, spelled: bool) -> bytes:
        """The bytes that a token adds to a text; with `spelled`, control tokens add their names."""
        hidden = not spelled and self._tokenizer.is_special(token_id)
        return b"" if hidden else self._data_of(token_id)


def chat_logprobs(entries: Iterable[TokenLogprobs], names: TokenNames, top_n: int) -> ChatLogprobs:
    """Log-probabilities in the format of `/v1/chat/completions`."""
    name, bytes_of = names.name, names.bytes_of
    listed: list[ChatLogprob] = []
    for token_id, logprob, _, most_probable in entries:
        top = [ChatTopLogprob(name(each), finite(value), bytes_of(each)) for each, value in most_probable[:top_n]]
        listed.append(ChatLogprob(name(token_id), finite(logprob), bytes_of(token_id), top))
    return ChatLogprobs(listed)


class CompletionLogprobsMaker:
    """Makes log-probabilities in the format of `/v1/completions`, delta by delta of one choice.

    Args:
        top_n: most probable tokens to list; the token itself is listed with them.
    """

    def __init__(self, names: TokenNames, top_n: int) -> None:
        self._names, self._top_n = names, top_n
        self._offset = 0
        self._decoder = _UTF8("replace")

    def make(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], *, spelled: bool = False
    ) -> CompletionLogprobs:
        """Convert the next tokens.

        Args:
            entries: one per token; None for the first token of a prompt.
            spelled: True if the text contains the names of control tokens.
        """
        made = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            made.tokens.append(self._names.name(token_id))
            made.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._names.text_bytes(token_id, spelled=spelled)))
            made.token_logprobs.append(None if entry is None else finite(entry.logprob))
            made.top_logprobs.append(None if entry is None else self._top(entry))
        return made

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._top_n], (entry.token_id, entry.logprob)):
            top.setdefault(self._names.name(token_id), finite(logprob))
        return top


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None] | None, names: TokenNames, top_n: int
) -> list[dict[str, Any] | None]:
    """A prompt's log-probabilities in vLLM's format: for each token null, or an object by token id."""
    listed: list[dict[str, Any] | None] = []
    for entry in entries or ():
        if entry is None:
            listed.append(None)
            continue
        ranks = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:top_n], start=1)}
        ranks.setdefault(entry.token_id, (entry.logprob, entry.rank))
        listed.append(
            {
                str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token_id)}
                for token_id, (logprob, rank) in ranks.items()
            }
        )
    return listed


def finite(logprob: float) -> float:
    """A log-probability as a number that JSON can express."""
    return _LOWEST if logprob < _LOWEST else logprob
