"""What a row's state says of its next token, and the state after it."""

from __future__ import annotations

from realizar.backends.cpu.kernels.sampling import record
from realizar.backends.cpu.kernels.sampling.dry import append_token
from realizar.backends.cpu.memory import inner, load_i64, read_i32, read_i64, write_i32, write_i64


@inner
def forbids_ends(row: int) -> bool:
    return load_i64(row, record.NUM_ENDS) > 0 and load_i64(row, record.OUTPUTS) < load_i64(row, record.MIN_TOKENS)


@inner
def adjusts(row: int) -> bool:
    """True if the row's parameters change logits, a mask apart."""
    listed = load_i64(row, record.NUM_BIASES) > 0 or load_i64(row, record.COUNTED) != 0
    return listed or load_i64(row, record.DRY_TOKENS) != 0 or forbids_ends(row)


@inner
def accept(row: int, token: int) -> None:
    write_i64(row, record.OUTPUTS, load_i64(row, record.OUTPUTS) + 1)
    if load_i64(row, record.DRY_TOKENS) != 0:
        append_token(row, token)
    ids, counts, size = load_i64(row, record.COUNTED), load_i64(row, record.COUNTS), load_i64(row, record.NUM_COUNTED)
    if ids == 0:
        return
    place = 0
    while place < size and read_i32(ids, place) != token:
        place += 1
    if place == size:
        write_i32(ids, place, token)
        write_i32(counts, place, 0)
        write_i64(row, record.NUM_COUNTED, size + 1)
    write_i32(counts, place, read_i32(counts, place) + 1)


@inner
def ends(row: int, token: int) -> bool:
    """True if the output ends with this token, the last one accepted.

    Before `min_tokens` a stop token is sampled only where a grammar leaves nothing else: it ends the output too.
    """
    early = load_i64(row, record.OUTPUTS) <= load_i64(row, record.MIN_TOKENS)
    if early and load_i64(row, record.ENDS_EARLY) == 0:
        return False
    for i in range(load_i64(row, record.NUM_ENDS)):
        if read_i64(load_i64(row, record.END_IDS), i) == token:
            return True
    return False
