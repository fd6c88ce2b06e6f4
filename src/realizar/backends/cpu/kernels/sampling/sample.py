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

from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.sampling import record
from realizar.backends.cpu.kernels.sampling.logits import Logits, find_largest
from realizar.backends.cpu.kernels.sampling.record import ROW, RUN, SAMPLE, Scratch, place_scratch
from realizar.backends.cpu.kernels.sampling.row_state import accept, adjusts, ends
from realizar.backends.cpu.memory import inner, read_i32, read_i64, write_i32, write_i64
from realizar.backends.cpu.walker import atomic_add, call_kernel


@inner
def _look(call: Any, at: int, vocab: int, scratch: Scratch) -> float:
    """Find the largest of the logits at an address, for the kernels that the call goes to; returns it."""
    logits: Logits = find_largest(at, vocab, scratch.tops)
    call.logits, call.best, call.top = at, logits.best, logits.top
    return logits.top


@inner
def _fail(run: Any, fault: int) -> int:
    write_i64(run.fault, 0, fault)
    return -1


@inner
def _score(arguments: Any, run: Any, at: int, index: int, token: int, scratch: Scratch) -> int:
    """Write the log-probabilities of a run's token; -1, with the fault noted, where the logits are not usable."""
    call, top_n = scratch.call, run.top_n
    top = _look(call, at, arguments.vocab, scratch)
    if not math.isfinite(top):
        return _fail(run, record.NO_LOGPROBS)
    call.token, call.top_n = token, top_n
    call.ids = run.ids + 4 * (2 + top_n) * index
    call.values = run.values + 8 * (1 + top_n) * index
    call_kernel(arguments.score, call, 0, 1)
    return 0


@inner
def _sample(arguments: Any, run: Any, row: Any, at: int, index: int, scratch: Scratch) -> int:
    """Sample the row's token number `index` and take it into its state; -1, with the fault noted, if none can be."""
    call, vocab, mask = scratch.call, arguments.vocab, run.mask
    if mask != 0:
        mask += index * run.mask_stride
    call.row = row
    read = at
    if mask != 0 or adjusts(row):
        call.logits, call.mask = at, mask
        call_kernel(arguments.adjust, call, 0, 1)
        read = scratch.adjusted
    top = _look(call, read, vocab, scratch)
    if not math.isfinite(top):
        forbidden = top == -np.inf and math.isfinite(_look(call, at, vocab, scratch))
        return _fail(run, record.NOTHING_ALLOWED if forbidden else record.UNUSABLE)
    if row.greedy != 0:
        call.token = call.best
    else:
        call.position = run.position + index
        call_kernel(arguments.draw, call, 0, 1)
    token, mu = call.token, call.new_mu
    if row.logprobs >= 0 and _score(arguments, run, at, index, token, scratch) < 0:
        return -1
    if row.mirostat != 0 and row.greedy == 0:
        row.mu = mu
    accept(row, token)
    return token


@inner
def _goes_on(run: Any, row: Any, made: int) -> bool:
    """True if every draft so far was sampled, and none ended the row's output."""
    if made == 0:
        return True
    last = read_i32(run.sampled, made - 1)
    return last == read_i32(run.drafts, made - 1) and not ends(row, last)


@kernel()
def sample(address: int, thread: int, threads: int) -> None:
    arguments = SAMPLE(address)
    vocab = arguments.vocab
    base = arguments.scratch + thread * arguments.scratch_bytes
    scratch = place_scratch(base, vocab)
    scratch.call.vocab, scratch.call.scratch = vocab, base
    while True:
        number = atomic_add(arguments.next, 1)
        if number >= arguments.count:
            return
        run = RUN(arguments.runs + number * record.RUN_BYTES)
        row, at = ROW(run.row), run.logits
        if run.row == 0:
            _score(arguments, run, at, 0, run.target, scratch)
            continue
        made, index = run.made, run.place
        for _ in range(run.count):
            if read_i64(made, 0) != index or not _goes_on(run, row, index):
                break
            token = _sample(arguments, run, row, at, index, scratch)
            if token < 0:
                break
            write_i32(run.sampled, index, token)
            index += 1
            write_i64(made, 0, index)
            at += arguments.stride
