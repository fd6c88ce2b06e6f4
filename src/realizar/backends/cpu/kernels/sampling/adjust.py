"""Changes of a row's logits before the temperature: a grammar's mask, end ids, bias, penalties, DRY; in a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.sampling.dry import bounded, penalise_repetitions
from realizar.backends.cpu.kernels.sampling.record import CALL, ROW, place_scratch
from realizar.backends.cpu.kernels.sampling.row_state import forbids_ends
from realizar.backends.cpu.memory import copy, inner, read_f32, read_f64, read_i32, read_i64, write_f32

_WORD = 32  # ids of a mask's word
_FORBIDDEN = np.float32(-np.inf)


@inner
def _copy_allowed(source: int, mask: int, vocab: int, target: int) -> None:
    """Logits whose bit of the mask is set; -inf in place of others. Without branches, as bits can't be guessed."""
    whole = vocab // _WORD
    for word in range(whole):
        bits, first = read_i32(mask, word), word * _WORD
        for i in range(_WORD):
            logit = read_f32(source, first + i)
            write_f32(target, first + i, logit if (bits >> i) & 1 != 0 else _FORBIDDEN)
    for i in range(whole * _WORD, vocab):
        is_allowed = (read_i32(mask, whole) >> (i % _WORD)) & 1 != 0
        write_f32(target, i, read_f32(source, i) if is_allowed else _FORBIDDEN)


@inner
def _forbid_ends(row: Any, source: int, vocab: int, mask: int, target: int) -> None:
    """Forbid the ids that end the output, unless a grammar allows nothing else: then it is complete."""
    count, ends = row.num_ends, row.end_ids
    for i in range(count):
        write_f32(target, read_i64(ends, i), _FORBIDDEN)
    if mask == 0:
        return
    for i in range(vocab):
        if not read_f32(target, i) == _FORBIDDEN:  # NaN too is allowed
            return
    for i in range(count):
        end = read_i64(ends, i)
        if (read_i32(mask, end // _WORD) >> (end % _WORD)) & 1 != 0:
            write_f32(target, end, read_f32(source, end))


@inner
def _add_biases(row: Any, target: int) -> None:
    ids, biases = row.bias_ids, row.biases
    for i in range(row.num_biases):
        token = read_i64(ids, i)
        before = read_f32(target, token)
        write_f32(target, token, bounded(np.float64(before) + read_f64(biases, i), before))


@inner
def _penalise(row: Any, target: int) -> None:
    """Repetition (Keskar et al., "CTRL", 2019, and its sign rule as in Hugging Face), presence and frequency.

    A logit above 0 is divided by the repetition penalty, any other is multiplied, for every id in prompt or output.
    Then, for ids in the output alone, `presence + frequency * count` is subtracted.
    """
    ids, counts = row.counted, row.counts
    repetition, presence = row.repetition_penalty, row.presence_penalty
    frequency = row.frequency_penalty
    for i in range(row.num_counted):
        token, count = read_i32(ids, i), read_i32(counts, i)
        before = read_f32(target, token)
        value = np.float64(before)
        value = value / repetition if value > 0.0 else value * repetition
        value -= frequency * count + (presence if count > 0 else 0.0)
        write_f32(target, token, bounded(value, before))


@kernel()
def adjust(address: int, thread: int, threads: int) -> None:
    """The kernel that writes the adjusted logits of a `CALL` to its scratch."""
    call = CALL(address)
    row, source = ROW(call.row), call.logits
    vocab, mask = call.vocab, call.mask
    target = place_scratch(call.scratch, vocab).adjusted
    if mask != 0:
        _copy_allowed(source, mask, vocab, target)
    else:
        copy(source, target, vocab)
    if forbids_ends(row):
        _forbid_ends(row, source, vocab, mask, target)
    _add_biases(row, target)
    _penalise(row, target)
    if row.dry_tokens != 0:
        penalise_repetitions(row, target, vocab)
