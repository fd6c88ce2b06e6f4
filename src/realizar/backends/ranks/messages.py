"""Messages between the ranks of a model: the calls of a backend in one direction, in the other what loading says, what
became of it, and contents of the cache.

Arrays go as their bytes, in the machine's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Capacity, ForwardInput
from realizar.backends.resolved_config import ResolvedConfig
from realizar.batch import LogprobQuery, OpenedRow, StateMoves, StepRows
from realizar.ipc.error_records import ErrorRecord
from realizar.request import Pooling


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The first message to a rank: the paths of the model and of what drafts for it, and its own configuration.

    `drafter` is empty where nothing drafts. `floats` are those of a slot in the memory that the ranks share.
    """

    model: str
    drafter: str
    config: ResolvedConfig
    rank: int
    ranks: int
    floats: int


class Open(msgspec.Struct, frozen=True, tag="open"):
    opened: OpenedRow


class Close(msgspec.Struct, frozen=True, tag="close"):
    row: int


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A `ForwardInput` without hidden states. Its rows' columns are those of `_COLUMNS`; tables have a row for each."""

    columns: tuple[bytes, ...]
    logprob_queries: dict[int, tuple[LogprobQuery, ...]]
    pooling: dict[int, Pooling]
    only_decodes: bool
    lookahead: bytes | None
    embeddings: tuple[tuple[int, int, bytes], ...]
    images: tuple[tuple[int, int], ...]
    positions: bytes
    slot_mapping: tuple[bytes, ...]
    block_tables: tuple[bytes, ...]
    state_moves: StateMoves


class Mask(msgspec.Struct, frozen=True, tag="mask"):
    """Masks of the step that was submitted last (`Step.set_masks`): by row their number, or 0 for one of one axis."""

    masks: dict[int, tuple[int, bytes]]


class Defer(msgspec.Struct, frozen=True, tag="defer"):
    rows: tuple[int, ...]


class Sample(msgspec.Struct, frozen=True, tag="sample"):
    """Sample the step that was submitted last, if it has not been."""


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Wait for the result of a step, by its number from 0 on."""

    step: int


class ReadCached(msgspec.Struct, frozen=True, tag="read_cached"):
    """Say a rank's contents of some blocks or snapshots of a part of the cache (`SavesCache`)."""

    part: int
    places: tuple[int, ...]


class WriteCached(msgspec.Struct, frozen=True, tag="write_cached"):
    """Write a rank's contents, uint8 [places, bytes of one]."""

    part: int
    places: tuple[int, ...]
    contents: bytes


class Cached(msgspec.Struct, frozen=True, tag="of_cache"):
    """What `ReadCached` asks for, uint8 [places, bytes of one]."""

    contents: bytes


class Said(msgspec.Struct, frozen=True, tag="said"):
    """A rank's word in an exchange."""

    word: bytes


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """The words of all ranks."""

    words: tuple[bytes, ...]


Call: TypeAlias = Join | Heard | Open | Close | Submit | Mask | Defer | Sample | Read | ReadCached | WriteCached


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    capacity: Capacity


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    error: ErrorRecord


Answer: TypeAlias = Said | Joined | Refused | Cached


_COLUMNS: Mapping[str, Any] = {
    "sequence_ids": np.int64, "numbers": np.intp, "num_computed_tokens": np.int32, "token_ids": np.int32,
    "starts": np.int32, "samples": np.bool_, "num_drafts": np.int32, "num_uncertain": np.int32,
}  # fmt: skip


def pack_step(step: ForwardInput) -> Submit:
    columns = step.columns
    return Submit(
        columns=tuple(getattr(columns, name).astype(kind, copy=False).tobytes() for name, kind in _COLUMNS.items()),
        logprob_queries=dict(columns.logprob_queries),
        pooling=dict(columns.pooling),
        only_decodes=columns.only_decodes,
        lookahead=None if columns.lookahead is None else columns.lookahead.astype(np.int32, copy=False).tobytes(),
        embeddings=tuple((first, len(values), values.tobytes()) for first, values in columns.embeddings),
        images=columns.images,
        positions=step.positions.tobytes(),
        slot_mapping=tuple(each.tobytes() for each in step.slot_mapping),
        block_tables=tuple(each.tobytes() for each in step.block_tables),
        state_moves=step.state_moves,
    )


def unpack_step(message: Submit) -> ForwardInput:
    found = {
        name: np.frombuffer(data, kind) for (name, kind), data in zip(_COLUMNS.items(), message.columns, strict=True)
    }
    columns = StepRows(
        **found,
        logprob_queries=message.logprob_queries,
        pooling=message.pooling,
        only_decodes=message.only_decodes,
        lookahead=None if message.lookahead is None else np.frombuffer(message.lookahead, np.int32),
        embeddings=tuple(
            (first, np.frombuffer(data, np.float32).reshape(count, -1)) for first, count, data in message.embeddings
        ),
        images=message.images,
    )
    rows = len(columns)
    return ForwardInput(
        columns,
        np.frombuffer(message.positions, np.int32),
        tuple(np.frombuffer(data, np.int32) for data in message.slot_mapping),
        tuple(np.frombuffer(data, np.int32).reshape(rows, -1 if rows else 0) for data in message.block_tables),
        message.state_moves,
    )


def pack_masks(masks: Mapping[int, NDArray[np.uint32]]) -> Mask:
    return Mask({row: (len(mask) if mask.ndim == 2 else 0, mask.tobytes()) for row, mask in masks.items()})


def unpack_masks(message: Mask) -> dict[int, NDArray[np.uint32]]:
    found = {row: (count, np.frombuffer(data, np.uint32)) for row, (count, data) in message.masks.items()}
    return {row: mask.reshape(count, -1) if count else mask for row, (count, mask) in found.items()}
