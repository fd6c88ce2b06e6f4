"""Log-probabilities in the formats of the two endpoints, written as JSON without a record for each token.

Chat: `{"content": [], "refusal": null}` with the objects of `server.generation.logprob_rows`.
Completions: `{"tokens": [], "token_logprobs": [], "top_logprobs": [{name: log-probability}], "text_offset": []}`, where
the first token of a prompt has null. Tokens are named by `TokenNames`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, TypeAlias

from realizar.logprob_columns import NO_ID, LogprobColumns, StepEntry
from realizar.outputs import TokenLogprobs
from realizar.server.generation.logprob_rows import LogprobRows, even_parts, finite, numbers_of
from realizar.server.token_names import TokenNames, parts_of

_UTF8 = codecs.getincrementaldecoder("utf-8")
CompletionToken: TypeAlias = tuple[bytes, bytes, bytes, bytes]
"""JSON of a token's name, its log-probability, the object of the most probable ones, and its place in the text."""
_BETWEEN = b'],"top_logprobs":[{'


def write_chat(rows: Iterable[bytes]) -> bytes:
    """The object of `/v1/chat/completions`, of its tokens' JSON."""
    return b'{"content":[%b],"refusal":null}' % b",".join(rows)


def write_completion(tokens: Sequence[CompletionToken]) -> bytes:
    """The object of `/v1/completions`."""
    lists = zip(*tokens, strict=True) if tokens else ((),) * 4
    form = b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}'
    return form % tuple(map(b",".join, lists))


def completion_rows(names: TokenNames, top_n: int) -> LogprobRows:
    """Writes tokens as two items of `/v1/completions`: the token's own number and the most probable ones' object.

    Between them is what stands there in an object of one token.
    """
    json_names = names.parts.names

    def write(columns: LogprobColumns) -> list[bytes]:
        width, shown = columns.width, min(columns.width, 1 + top_n)
        ids, values = columns.id_list(), numbers_of(columns.value_list())
        if NO_ID in ids:
            return [row for part in even_parts(columns) for row in write(part)]
        every = parts_of(json_names, ids)
        named = [every[place::width] for place in range(shown)]
        parts: list[Iterable[bytes]] = []
        for place in range(1, shown):
            parts += (named[place], repeat(b":"), values[place::width], repeat(b"," if place + 1 < shown else b""))
        tops = map(b"".join, zip(*parts, strict=False)) if parts else repeat(b"")  # the fillers do not end
        rows: list[bytes] = []
        for names, own, top in zip(zip(*named, strict=True), values[::width], tops, strict=False):
            num_names = len(set(names))
            if num_names == shown:
                top = b"%b,%b:%b" % (top, names[0], own) if top else b"%b:%b" % (names[0], own)
            elif num_names + 1 < shown or names.count(names[0]) == 1:
                top = _first_of_each_name(columns.between(len(rows), len(rows) + 1), names)
            rows.append(own + _BETWEEN + top)
        return rows

    return LogprobRows(write)


class CompletionLogprobsMaker:
    """Makes log-probabilities in the format of `/v1/completions`, delta by delta of one choice."""

    def __init__(self, names: TokenNames, rows: LogprobRows) -> None:
        self._names, self._parts, self._rows = names, names.parts, rows
        self._offset = 0
        self._decoder = _UTF8("replace")
        self._mid_character = False

    def text(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], *, spelled: bool = False
    ) -> bytes:
        """The whole object for the next tokens; arguments as of `make`."""
        if isinstance(entries, StepEntry) and len(token_ids) == 1:
            token_id = token_ids[0]
            name, row = self._parts.names[token_id], self._rows.row(entries)
            place = self._place_of(token_id, spelled=spelled)
            return b'{"tokens":[%b],"token_logprobs":[%b}],"text_offset":[%d]}' % (name, row, place)
        return write_completion(self.make(token_ids, entries, spelled=spelled))

    def make(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], *, spelled: bool = False
    ) -> list[CompletionToken]:
        """Convert the next tokens; an entry of None is for the first token of a prompt.

        With `spelled` the text contains the names of control tokens.
        """
        scored = entries if isinstance(entries, LogprobColumns | StepEntry) else [each for each in entries if each]
        values = [(b"null", b"null")] * (len(entries) - len(scored))  # none but a prompt's first token
        for row in self._rows.rows(scored):
            value, _, top = row.partition(_BETWEEN)
            values.append((value, b"{%b}" % top))
        return [
            (self._parts.names[token_id], value, top, b"%d" % self._place_of(token_id, spelled=spelled))
            for token_id, (value, top) in zip(token_ids, values, strict=True)
        ]

    def _place_of(self, token_id: int, *, spelled: bool) -> int:
        """The place in the text where a token begins, in characters; the token's own are added."""
        place = self._offset
        count = -1 if spelled or self._mid_character else self._parts.num_characters[token_id]
        if count < 0:
            count = len(self._decoder.decode(self._names.text_bytes(token_id, spelled=spelled)))
            self._mid_character = bool(self._decoder.getstate()[0])
        self._offset += count
        return place


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


def _first_of_each_name(columns: LogprobColumns, names: Sequence[bytes]) -> bytes:
    """A token's object where several ids have one name, the first its own: the most probable of them counts."""
    values = numbers_of(columns.value_list())
    top: dict[bytes, bytes] = {}
    for name, value in zip((*names[1:], names[0]), (*values[1 : len(names)], values[0]), strict=True):
        top.setdefault(name, value)
    return b",".join(map(b"%b:%b".__mod__, top.items()))
