"""Changes of a row's logits before the temperature: a grammar's mask, end ids, bias, penalties, DRY; in a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.sampling import record
from realizar.backends.cpu.kernels.sampling.dry import bounded, penalise_repetitions
from realizar.backends.cpu.kernels.sampling.logits import copy
from realizar.backends.cpu.kernels.sampling.record import ROW, place_scratch
from realizar.backends.cpu.kernels.sampling.row_state import forbids_ends
from realizar.backends.cpu.memory import inner, load_i64, read_f32, read_f64, read_i32, read_i64, write_f32

_REPETITION, _PRESENCE, _FREQUENCY = (ROW[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
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
def _forbid_ends(row: int, source: int, vocab: int, mask: int, target: int) -> None:
    """Forbid the ids that end the output, unless a grammar allows nothing else: then it is complete."""
    count, ends = load_i64(row, record.NUM_ENDS), load_i64(row, record.END_IDS)
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
def _add_biases(row: int, target: int) -> None:
    ids, biases = load_i64(row, record.BIAS_IDS), load_i64(row, record.BIASES)
    for i in range(load_i64(row, record.NUM_BIASES)):
        token = read_i64(ids, i)
        before = read_f32(target, token)
        write_f32(target, token, bounded(np.float64(before) + read_f64(biases, i), before))


@inner
def _penalise(row: int, target: int) -> None:
    """Repetition (Keskar et al., "CTRL", 2019, and its sign rule as in Hugging Face), presence and frequency.

    A logit above 0 is divided by the repetition penalty, any other is multiplied, for every id in prompt or output.
    Then, for ids in the output alone, `presence + frequency * count` is subtracted.
    """
    ids, counts = load_i64(row, record.COUNTED), load_i64(row, record.COUNTS)
    repetition, presence = read_f64(row, _REPETITION), read_f64(row, _PRESENCE)
    frequency = read_f64(row, _FREQUENCY)
    for i in range(load_i64(row, record.NUM_COUNTED)):
        token, count = read_i32(ids, i), read_i32(counts, i)
        before = read_f32(target, token)
        value = np.float64(before)
        value = value / repetition if value > 0.0 else value * repetition
        value -= frequency * count + (presence if count > 0 else 0.0)
        write_f32(target, token, bounded(value, before))


def make_adjust() -> Any:
    """The kernel that writes the adjusted logits of a `CALL` to its scratch."""

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def adjust(call: int, thread: int, threads: int) -> None:
        row, source = load_i64(call, record.CALL_ROW), load_i64(call, record.CALL_LOGITS)
        vocab, mask = load_i64(call, record.CALL_VOCAB), load_i64(call, record.CALL_MASK)
        target = place_scratch(load_i64(call, record.CALL_SCRATCH), vocab).adjusted
        if mask != 0:
            _copy_allowed(source, mask, vocab, target)
        else:
            copy(source, target, vocab)
        if forbids_ends(row):
            _forbid_ends(row, source, vocab, mask, target)
        _add_biases(row, target)
        _penalise(row, target)
        if load_i64(row, record.DRY_TOKENS) != 0:
            penalise_repetitions(row, target, vocab)

    return adjust
