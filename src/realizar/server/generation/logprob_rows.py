"""`LogprobRows`: log-probabilities written as JSON without a record for each token, and the objects of chat tokens.

`{"token", "logprob", "bytes", "top_logprobs": [{"token", "logprob", "bytes"}]}`, with tokens named by `TokenNames`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import repeat

import msgspec

from realizar.logprob_columns import NO_ID, LogprobColumns, StepEntry
from realizar.outputs import TokenLogprobs
from realizar.server.generation.token_kinds import TokenKind
from realizar.server.token_names import TokenNames, parts_of

_LOWEST = -9999.0  # stands for minus infinity, which JSON lacks: an impossible token
_NUMBERS = msgspec.json.Encoder()
_RECENT_STEPS = 2  # a consumer who lags behind more gets several tokens at once


class LogprobRows:
    """Log-probabilities of tokens as JSON, those of a whole step at once where many streams are at the same step.

    `write` makes the JSON of each token of columns.
    """

    def __init__(self, write: Callable[[LogprobColumns], list[bytes]]) -> None:
        self._write = write
        self._recent: deque[tuple[LogprobColumns, list[bytes]]] = deque(maxlen=_RECENT_STEPS)

    def row(self, entry: StepEntry) -> bytes:
        """The JSON of one token, with which that of its step is written."""
        columns = entry.columns
        for known, rows in self._recent:
            if known is columns:
                return rows[entry.at]
        rows = self._write(columns)
        self._recent.append((columns, rows))
        return rows[entry.at]

    def rows(self, entries: Sequence[TokenLogprobs]) -> list[bytes]:
        if isinstance(entries, StepEntry):
            return [self.row(entries)]
        columns = LogprobColumns.of(entries)
        return self._write(columns) if len(columns) else []


class RowsOfKinds:
    """The log-probabilities of one answer's tokens of some kinds; they wait until it is known of what kind they are."""

    def __init__(self, rows: LogprobRows, wanted: Collection[TokenKind]) -> None:
        self._rows, self._wanted = rows, wanted
        self._waiting: list[bytes] = []

    def take_in(self, entries: Sequence[TokenLogprobs], kinds: Sequence[TokenKind]) -> list[bytes]:
        """Take in tokens, and the kinds that are known now; returns those of the wanted kinds among these."""
        if entries:
            self._waiting += self._rows.rows(entries)
        found = [row for row, kind in zip(self._waiting, kinds, strict=False) if kind in self._wanted]
        del self._waiting[: len(kinds)]
        return found


def chat_rows(names: TokenNames, top_n: int) -> LogprobRows:
    """Writes tokens as `/v1/chat/completions` has them, with at most `top_n` most probable ones."""
    named, in_bytes, _ = names.parts

    def write(columns: LogprobColumns) -> list[bytes]:
        width, shown = columns.width, min(columns.width, 1 + top_n)
        ids, values = columns.id_list(), numbers_of(columns.value_list())
        if NO_ID in ids:
            return [row for part in even_parts(columns) for row in write(part)]
        spelled, data = parts_of(named, ids), parts_of(in_bytes, ids)
        parts: list[Iterable[bytes]] = []
        for place in range(shown):
            parts += (
                repeat((b'{"token":', b',"top_logprobs":[{"token":', b'},{"token":')[min(place, 2)]),
                spelled[place::width],
                repeat(b',"logprob":'),
                values[place::width],
                repeat(b',"bytes":'),
                data[place::width],
            )
        end = repeat(b"}]}" if shown > 1 else b',"top_logprobs":[]}')
        return list(map(b"".join, zip(*parts, end, strict=False)))  # the fillers do not end

    return LogprobRows(write)


def even_parts(columns: LogprobColumns) -> Iterator[LogprobColumns]:
    """Each token of columns of which some list fewer ids than others."""
    for entry in columns:
        yield LogprobColumns.of([entry])


def numbers_of(values: list[float]) -> list[bytes]:
    """Log-probabilities as numbers of JSON, one or more."""
    if min(values) < _LOWEST:
        values = [finite(value) for value in values]
    return _NUMBERS.encode(values)[1:-1].split(b",")


def finite(logprob: float) -> float:
    """A log-probability as a number that JSON can express."""
    return _LOWEST if logprob < _LOWEST else logprob
