"""The kernel of sampling: threads take the runs of a step one after another, each run by one thread from end to end.

So a row's token depends on its own logits and state alone, whatever the threads and the other rows.

The order in a row: the grammar's mask and forbidden end ids, logit bias, repetition, presence and frequency penalties,
DRY; at temperature 0 the largest logit, lowest id first; else temperature, top-n-sigma, top-k, typical, top-p, min-p,
XTC, or in place of these truncations mirostat 2. Adjusted logits are float32, as on any device.

Adjusting, drawing and log-probabilities are kernels of their own, called by address: one function of all of it would
take the compiler twice as long.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.sampling import record
from realizar.backends.cpu.kernels.sampling.logits import Logits, find_largest
from realizar.backends.cpu.kernels.sampling.record import Scratch, place_scratch
from realizar.backends.cpu.kernels.sampling.row_state import accept, adjusts, ends
from realizar.backends.cpu.memory import inner, load_i64, read_i32, read_i64, write_f64, write_i32, write_i64
from realizar.backends.cpu.walker import atomic_add, call_kernel


@inner
def _look(call: int, at: int, vocab: int, scratch: Scratch) -> float:
    """Find the largest of the logits at an address, for the kernels that the call goes to; returns it."""
    logits: Logits = find_largest(at, vocab, scratch.tops)
    write_i64(call, record.CALL_LOGITS, at)
    write_i64(call, record.CALL_BEST, logits.best)
    write_f64(call, record.CALL_TOP, logits.top)
    return logits.top


@inner
def _fail(run: int, fault: int) -> int:
    write_i64(load_i64(run, record.RUN_FAULT), 0, fault)
    return -1


@inner
def _score(arguments: int, run: int, at: int, index: int, token: int, scratch: Scratch) -> int:
    """Write the log-probabilities of a run's token; -1, with the fault noted, where the logits are not usable."""
    call, top_n = scratch.call, load_i64(run, record.RUN_TOP_N)
    top = _look(call, at, load_i64(arguments, record.VOCAB), scratch)
    if not math.isfinite(top):
        return _fail(run, record.NO_LOGPROBS)
    write_i64(call, record.CALL_TOKEN, token)
    write_i64(call, record.CALL_TOP_N, top_n)
    write_i64(call, record.CALL_IDS, load_i64(run, record.RUN_IDS) + 4 * (2 + top_n) * index)
    write_i64(call, record.CALL_VALUES, load_i64(run, record.RUN_VALUES) + 8 * (1 + top_n) * index)
    call_kernel(load_i64(arguments, record.SCORE), call, 0, 1)
    return 0


@inner
def _sample(arguments: int, run: int, row: int, at: int, index: int, scratch: Scratch) -> int:
    """Sample the row's token number `index` and take it into its state; -1, with the fault noted, if none can be."""
    call, vocab, mask = scratch.call, load_i64(arguments, record.VOCAB), load_i64(run, record.RUN_MASK)
    if mask != 0:
        mask += index * load_i64(run, record.RUN_MASK_STRIDE)
    write_i64(call, record.CALL_ROW, row)
    read = at
    if mask != 0 or adjusts(row):
        write_i64(call, record.CALL_LOGITS, at)
        write_i64(call, record.CALL_MASK, mask)
        call_kernel(load_i64(arguments, record.ADJUST), call, 0, 1)
        read = scratch.adjusted
    top = _look(call, read, vocab, scratch)
    if not math.isfinite(top):
        forbidden = top == -np.inf and math.isfinite(_look(call, at, vocab, scratch))
        return _fail(run, record.NOTHING_ALLOWED if forbidden else record.UNUSABLE)
    if load_i64(row, record.GREEDY) != 0:
        write_i64(call, record.CALL_TOKEN, load_i64(call, record.CALL_BEST))
    else:
        write_i64(call, record.CALL_POSITION, load_i64(run, record.RUN_POSITION) + index)
        call_kernel(load_i64(arguments, record.DRAW), call, 0, 1)
    token, mu = load_i64(call, record.CALL_TOKEN), load_i64(call, record.CALL_NEW_MU)
    if load_i64(row, record.LOGPROBS) >= 0 and _score(arguments, run, at, index, token, scratch) < 0:
        return -1
    if load_i64(row, record.MIROSTAT) != 0 and load_i64(row, record.GREEDY) == 0:
        write_i64(row, record.MU, mu)
    accept(row, token)
    return token


@inner
def _goes_on(run: int, row: int, made: int) -> bool:
    """True if every draft so far was sampled, and none ended the row's output."""
    if made == 0:
        return True
    last = read_i32(load_i64(run, record.RUN_SAMPLED), made - 1)
    return last == read_i32(load_i64(run, record.RUN_DRAFTS), made - 1) and not ends(row, last)


def make_sample() -> Any:
    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def sample(arguments: int, thread: int, threads: int) -> None:
        vocab = load_i64(arguments, record.VOCAB)
        base = load_i64(arguments, record.SCRATCH) + thread * load_i64(arguments, record.SCRATCH_BYTES)
        scratch = place_scratch(base, vocab)
        write_i64(scratch.call, record.CALL_VOCAB, vocab)
        write_i64(scratch.call, record.CALL_SCRATCH, base)
        while True:
            number = atomic_add(load_i64(arguments, record.NEXT), 1)
            if number >= load_i64(arguments, record.COUNT):
                return
            run = load_i64(arguments, record.RUNS) + number * record.RUN_BYTES
            row, at = load_i64(run, record.RUN_ROW), load_i64(run, record.RUN_LOGITS)
            if row == 0:
                _score(arguments, run, at, 0, load_i64(run, record.RUN_TARGET), scratch)
                continue
            made, index = load_i64(run, record.RUN_MADE), load_i64(run, record.RUN_PLACE)
            for _ in range(load_i64(run, record.RUN_COUNT)):
                if read_i64(made, 0) != index or not _goes_on(run, row, index):
                    break
                token = _sample(arguments, run, row, at, index, scratch)
                if token < 0:
                    break
                write_i32(load_i64(run, record.RUN_SAMPLED), index, token)
                index += 1
                write_i64(made, 0, index)
                at += load_i64(arguments, record.STRIDE)

    return sample
