"""What a row's state says of its next token, and the state after it."""

from __future__ import annotations

from typing import Any

from realizar.backends.cpu.kernels.sampling.dry import append_token
from realizar.backends.cpu.memory import inner, read_i32, read_i64, write_i32


@inner
def forbids_ends(row: Any) -> bool:
    return row.num_ends > 0 and row.outputs < row.min_tokens


@inner
def adjusts(row: Any) -> bool:
    """True if the row's parameters change logits, a mask apart."""
    listed = row.num_biases > 0 or row.counted != 0
    return listed or row.dry_tokens != 0 or forbids_ends(row)


@inner
def accept(row: Any, token: int) -> None:
    row.outputs = row.outputs + 1
    if row.dry_tokens != 0:
        append_token(row, token)
    ids, counts, size = row.counted, row.counts, row.num_counted
    if ids == 0:
        return
    place = 0
    while place < size and read_i32(ids, place) != token:
        place += 1
    if place == size:
        write_i32(ids, place, token)
        write_i32(counts, place, 0)
        row.num_counted = size + 1
    write_i32(counts, place, read_i32(counts, place) + 1)


@inner
def ends(row: Any, token: int) -> bool:
    """True if the output ends with this token, the last one accepted.

    Before `min_tokens` a stop token is sampled only where a grammar leaves nothing else: it ends the output too.
    """
    early = row.outputs <= row.min_tokens
    if early and row.ends_early == 0:
        return False
    for i in range(row.num_ends):
        if read_i64(row.end_ids, i) == token:
            return True
    return False
