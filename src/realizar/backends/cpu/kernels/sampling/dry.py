"""DRY, "don't repeat yourself": penalises a token that would lengthen a repetition.

By the description of its author (p-e-w, 2024): where the end of the sequence, of n tokens, occurred before, the token
that followed there loses `multiplier * base ** (n - allowed_length)`, for the longest such n of at least
`allowed_length`. No match extends over a sequence breaker, and breakers are never penalised.

`lengths[j + 1]` is how many tokens ending at j equal those at the end of the sequence; `lengths[0]` is 0. Appending
token x makes it `lengths[j] + 1` where token j is x, else 0, and 0 everywhere if x is a breaker.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from realizar.backends.cpu.memory import (
    inner,
    read_f32,
    read_i32,
    read_i64,
    write_f32,
    write_i32,
)

_LARGEST = float(np.finfo(np.float32).max)


@inner
def bounded(value: float, before: float) -> float:
    """An adjusted logit, bounded to finite float32; one that is not finite, such as a forbidden id's, stays so."""
    if not -_LARGEST <= before <= _LARGEST:
        return before
    return np.float32(max(min(value, _LARGEST), -_LARGEST))


@inner
def is_breaker(row: Any, token: int) -> bool:
    """True if no match extends over this token; breakers lie sorted."""
    count = row.num_breakers
    if count == 0:
        return False
    breakers, low, high = row.breakers, 0, count
    while low < high:
        middle = (low + high) // 2
        if read_i64(breakers, middle) < token:
            low = middle + 1
        else:
            high = middle
    return low < count and read_i64(breakers, low) == token


@inner
def window_start(row: Any) -> int:
    size, window = row.dry_size, row.dry_penalty_last_n
    return 0 if window < 0 else max(0, size - window)


@inner
def append_token(row: Any, token: int) -> None:
    """Take in a token; one beyond the room that a context has is dropped."""
    last = row.dry_size
    if last >= row.dry_places:
        return
    tokens, lengths = row.dry_tokens, row.dry_lengths
    write_i32(tokens, last, token)
    row.dry_size = last + 1
    start = 0 if is_breaker(row, token) else last
    for i in range(start, window_start(row), -1):  # downwards: each reads the one before
        write_i32(lengths, i, read_i32(lengths, i - 1) + 1 if read_i32(tokens, i - 1) == token else 0)
    for i in range(start, last + 1):
        write_i32(lengths, i + 1, 0)


@inner
def penalise_repetitions(row: Any, logits: int, vocab: int) -> None:
    """Penalise in place. A token that follows several matches loses the most that one of them takes."""
    if row.dry_matched == 0:
        _match_suffixes(row)
        row.dry_matched = 1
    tokens, lengths = row.dry_tokens, row.dry_lengths
    found, start, allowed = row.dry_found, window_start(row), row.dry_allowed_length
    for turn in range(2):  # first from the logits as they are, then all at once
        for i in range(start, row.dry_size - 1):
            length = read_i32(lengths, i + 1)
            if start > 0:
                length = min(length, i - start + 1)  # a match does not reach back beyond the window
            token = read_i32(tokens, i + 1)
            if length < allowed or token < 0 or token >= vocab or is_breaker(row, token):
                continue
            before = read_f32(logits, token)
            if turn == 0:
                growth = row.dry_base ** np.float64(length - allowed)
                penalty = min(row.dry_multiplier * growth, _LARGEST)
                write_f32(found, i, bounded(np.float64(before) - penalty, before))
            elif read_f32(found, i) < before:
                write_f32(logits, token, read_f32(found, i))


@inner
def _match_suffixes(row: Any) -> None:
    """Match lengths of the history that the row was opened with: the Z function of the reversed sequence.

    Linear in its length. `lengths` is all 0 before.
    """
    size, tokens = row.dry_size, row.dry_tokens
    found = row.dry_lengths + 4
    limit = 0
    while limit < size and not is_breaker(row, read_i32(tokens, size - 1 - limit)):
        limit += 1
    left = right = 0
    for i in range(1, size):
        length = min(read_i32(found, size - 1 - i + left), right - i) if i < right else 0
        while i + length < size and read_i32(tokens, size - 1 - length) == read_i32(tokens, size - 1 - i - length):
            length += 1
        write_i32(found, size - 1 - i, length)
        if i + length > right:
            left, right = i, i + length
    for i in range(size):
        write_i32(found, i, min(read_i32(found, i), limit))
