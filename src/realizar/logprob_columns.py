"""`LogprobColumns`: log-probabilities of many tokens as columns, from engine to answer. Standard library only.

A record for each token would cost every process on the way more time than the rest of the token's work.
"""

from __future__ import annotations

import operator
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar.outputs import TokenLogprobs

NO_ID = -1  # in the places that a token's list leaves free
_ID_BYTES = _RANK_BYTES = 4
_VALUE_BYTES = 8
_VALUE = struct.Struct("=d")


@dataclass(slots=True, eq=False)  # one a row and step: frozen it would take four times as long to make
class LogprobColumns(Sequence[TokenLogprobs]):
    """Log-probabilities of tokens in their order: a sequence of `TokenLogprobs`, each made when it is read.

    Columns are bytes in the machine's order.

    Attributes:
        width: places of each token: one for itself, and as many as the longest list of most probable ids takes.
        ids: int32 [tokens, width]: the token's id, then the most probable ones, best first, then NO_ID.
        values: float64 [tokens, width]: their log-probabilities.
        ranks: int32 [tokens]: the rank of each token; 1 is the most probable.
    """

    width: int = 1
    ids: bytes = b""
    values: bytes = b""
    ranks: bytes = b""

    @classmethod
    def of(cls, entries: Sequence[TokenLogprobs]) -> LogprobColumns:
        """The columns of single tokens; columns are returned as they are."""
        if isinstance(entries, LogprobColumns):
            return entries
        if isinstance(entries, StepEntry):
            return entries.alone()
        width = 1 + max([len(entry.top) for entry in entries], default=0)
        ids: list[int] = []
        values: list[float] = []
        for token_id, logprob, _, top in entries:
            ids.append(token_id)
            values.append(logprob)
            if top:
                top_ids, top_values = zip(*top, strict=True)
                ids += top_ids
                values += top_values
            if free := width - 1 - len(top):
                ids += [NO_ID] * free
                values += [0.0] * free
        ranks = array("i", [entry.rank for entry in entries])
        return cls(width, array("i", ids).tobytes(), array("d", values).tobytes(), ranks.tobytes())

    @classmethod
    def joined(cls, parts: Sequence[LogprobColumns]) -> LogprobColumns:
        width = max((part.width for part in parts), default=1)
        parts = [part.widened(width) for part in parts]
        return cls(
            width,
            b"".join([part.ids for part in parts]),
            b"".join([part.values for part in parts]),
            b"".join([part.ranks for part in parts]),
        )

    def widened(self, width: int) -> LogprobColumns:
        """The same tokens with at least so many places each."""
        free = width - self.width
        if free <= 0:
            return self
        ids, values = array("i", [NO_ID] * free).tobytes(), bytes(free * _VALUE_BYTES)
        return LogprobColumns(
            width,
            _lengthened(self.ids, self.width * _ID_BYTES, ids),
            _lengthened(self.values, self.width * _VALUE_BYTES, values),
            self.ranks,
        )

    def fits(self, num_tokens: int) -> bool:
        sizes = num_tokens * self.width * _ID_BYTES, num_tokens * self.width * _VALUE_BYTES, num_tokens * _RANK_BYTES
        return self.width >= 1 and sizes == (len(self.ids), len(self.values), len(self.ranks))

    def id_list(self) -> list[int]:
        """`ids` as integers, [tokens * width]."""
        return memoryview(self.ids).cast("i").tolist()

    def value_list(self) -> list[float]:
        """`values` as numbers, [tokens * width]."""
        return array("d", self.values).tolist()

    def __len__(self) -> int:
        return len(self.ranks) // _RANK_BYTES

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.picked(range(len(self))[index])
        at = range(len(self))[index]
        return next(iter(self.between(at, at + 1)))

    def between(self, start: int, stop: int) -> LogprobColumns:
        """The tokens from `start` up to `stop`, both from 0 up to their number."""
        first, last = start * self.width, stop * self.width
        return LogprobColumns(
            self.width,
            self.ids[first * _ID_BYTES : last * _ID_BYTES],
            self.values[first * _VALUE_BYTES : last * _VALUE_BYTES],
            self.ranks[start * _RANK_BYTES : stop * _RANK_BYTES],
        )

    def apart(self) -> list[StepEntry]:
        return [StepEntry(self, index) for index in range(len(self))]

    def picked(self, indices: Sequence[int]) -> LogprobColumns:
        if len(indices) == len(self) and all(map(operator.eq, indices, range(len(self)))):
            return self
        if isinstance(indices, range) and indices.step == 1:
            return self.between(indices.start, indices.stop)
        ids, values = self.width * _ID_BYTES, self.width * _VALUE_BYTES
        return LogprobColumns(
            self.width,
            b"".join([self.ids[at * ids : (at + 1) * ids] for at in indices]),
            b"".join([self.values[at * values : (at + 1) * values] for at in indices]),
            b"".join([self.ranks[at * _RANK_BYTES : (at + 1) * _RANK_BYTES] for at in indices]),
        )

    def __iter__(self) -> Iterator[TokenLogprobs]:
        width, ids, values = self.width, self.id_list(), self.value_list()
        for start, rank in zip(range(0, len(ids), width), memoryview(self.ranks).cast("i").tolist(), strict=True):
            stop = start + width
            while ids[stop - 1] == NO_ID and stop > start + 1:
                stop -= 1
            top = tuple(zip(ids[start + 1 : stop], values[start + 1 : stop], strict=True))
            yield TokenLogprobs(ids[start], values[start], rank, top)

    def __eq__(self, other: object) -> bool:
        """True for a sequence of the same entries, whatever holds them."""
        if not isinstance(other, LogprobColumns | StepEntry | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(mine == each for mine, each in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))


def _lengthened(column: bytes, size: int, end: bytes) -> bytes:
    """A column with an end after every token's `size` bytes."""
    return b"".join([column[at : at + size] + end for at in range(0, len(column), size)])


@dataclass(slots=True, eq=False)
class StepEntry(Sequence[TokenLogprobs]):
    """The log-probabilities of one token, where they came: in the columns of its step, the token number `at`.

    Whoever writes them can write those of the whole step at once.
    """

    columns: LogprobColumns
    at: int

    @property
    def logprob(self) -> float:
        value: float = _VALUE.unpack_from(self.columns.values, self.at * self.columns.width * _VALUE_BYTES)[0]
        return value

    def alone(self) -> LogprobColumns:
        return self.columns.between(self.at, self.at + 1)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int | slice) -> Any:
        return self.alone()[index]

    def __eq__(self, other: object) -> bool:
        return self.alone().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.alone())


class RowColumns(Mapping[int, StepEntry]):
    """Entries of a step's rows that have one token each, by row, in columns that whoever hands them on leaves whole.

    Attributes:
        rows: indices in the step, in the order of the columns' tokens.
    """

    def __init__(self, rows: Sequence[int], columns: LogprobColumns) -> None:
        self.rows, self.columns = rows, columns

    def __getitem__(self, row: int) -> StepEntry:
        try:
            return StepEntry(self.columns, self.rows.index(row))
        except ValueError:
            raise KeyError(row) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)
