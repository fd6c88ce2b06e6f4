"""Temperature, truncations and draws. Each truncation sees what the one before left, renormalised, and leaves an id.

Most truncations can keep few ids: those are gathered into a pool, with a bound below which no id can stay, and the
others count in sums alone. Equally probable ids are ordered by lower id.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from realizar.backends.cpu.codegen.logit_blocks import NO_WEIGHT
from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.sampling.logits import (
    Logits,
    deviation,
    draw_of_all,
    inverse_of,
    logits_of,
    weigh_all,
)
from realizar.backends.cpu.kernels.sampling.pool import (
    draw,
    gather,
    keep_prefix,
    keep_weights,
    largest,
    move,
    sum_of,
    weigh_pool,
)
from realizar.backends.cpu.kernels.sampling.record import CALL, ROW, Scratch, place_scratch
from realizar.backends.cpu.memory import (
    copy,
    inner,
    read_f32,
    read_f64,
    read_i32,
    write_f32,
    write_f64,
    write_i32,
)

_SLACK = 1e-9  # by which a bound, found through a logarithm, is lowered, so that rounding loses no id
_LEAST_REST = 1e-16
_LIKELY = math.log(6.0)  # with 8 in its place normal logits of standard deviation 1 need a second pass
_LN2 = math.log(2.0)
_NO_POOL = -1
_DRAW_TOKEN, _DRAW_XTC = 0, 1  # numbers of the draws that pick the token, and decide whether XTC acts
# Of Philox4x32-10.
_WORD = np.uint64(0xFFFFFFFF)
_FIRST, _SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_FIRST_STEP, _SECOND_STEP = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_HALF = np.uint64(32)


@inner
def uniform_of(row: Any, position: int, draw: int) -> float:
    """A number in [0, 1) with 24 bits, of a row's seed and choice, a position and the number of a draw, 0 to 3.

    It depends on nothing else: not on what else runs, on batching, or on preemption. Philox4x32-10 is from Salmon,
    Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC'11). Its key is the seed, low word first,
    its counter (position, choice, 0, 0); draw d takes word d.
    """
    seed = np.uint64(row.seed)
    c0, c1 = np.uint64(position) & _WORD, np.uint64(row.choice) & _WORD
    c2 = c3 = np.uint64(0)
    k0, k1 = seed & _WORD, seed >> _HALF
    for _ in range(10):
        wide0, wide1 = _FIRST * c0, _SECOND * c2
        c0, c1, c2, c3 = (wide1 >> _HALF) ^ c1 ^ k0, wide1 & _WORD, (wide0 >> _HALF) ^ c3 ^ k1, wide0 & _WORD
        k0, k1 = (k0 + _FIRST_STEP) & _WORD, (k1 + _SECOND_STEP) & _WORD
    word = c0 if draw == 0 else (c1 if draw == 1 else (c2 if draw == 2 else c3))
    return np.float64(np.int64(word >> np.uint64(8))) * 2.0**-24


@inner
def draw_token(row: Any, position: int, logits: Logits, scratch: Scratch) -> int:
    uniform = uniform_of(row, position, _DRAW_TOKEN)
    temperature = row.temperature
    inverse = inverse_of(temperature)
    chance = row.xtc_probability
    xtc = chance > 0.0 and uniform_of(row, position, _DRAW_XTC) < chance
    count, total = _truncate(row, logits, temperature, inverse, scratch)
    if count == _NO_POOL:
        if xtc:
            least = row.xtc_threshold * total
            logits = _exclude(logits, temperature, inverse, least, scratch)
            total, _ = weigh_all(logits, inverse, scratch)
        return draw_of_all(logits, inverse, uniform, total, scratch)
    if row.min_p > 0.0:
        most = 0.0
        for i in range(count):
            most = max(most, read_f64(scratch.weights, i))
        count = keep_weights(row.min_p * most, count, scratch)
    if xtc:
        count = _exclude_of_pool(row.xtc_threshold, count, scratch)
    return read_i32(scratch.ids, draw(uniform, count, scratch))


@inner
def _truncate(row: Any, logits: Logits, temperature: float, inverse: float, scratch: Scratch) -> tuple[int, float]:
    """Top-n-sigma, top-k, typical, top-p: the pool's size (_NO_POOL if none acts, nor min-p), and all ids' weight."""
    typical_p, top_p, min_p = row.typical_p, row.top_p, row.min_p
    count = _restrict(row, logits, inverse, scratch)
    total = moment = 0.0
    if count != _NO_POOL:
        total = sum_of(scratch.weights, count)
    elif typical_p < 1.0 or top_p < 1.0 or min_p <= 0.0:
        total, moment = weigh_all(logits, inverse, scratch)
    if typical_p < 1.0:
        if count != _NO_POOL:
            moment = _moment_of_pool(count, scratch)
        count = _typical(typical_p, logits, temperature, inverse, total, moment, count, scratch)
        total = sum_of(scratch.weights, count)
    if top_p < 1.0:
        if count == _NO_POOL:
            # Ids of weight below (1 - mass) * total / vocab hold less than 1 - mass together: never part of it. Those
            # below some times that weight seldom hold more, so they are left out at first.
            floor = math.log(max(1.0 - top_p, _LEAST_REST) * total / logits.vocab) - _SLACK
            count = gather(logits, temperature, inverse, floor + _LIKELY, scratch)
            if sum_of(scratch.weights, count) < top_p * total:
                count = gather(logits, temperature, inverse, floor, scratch)
        count = keep_prefix(top_p * total, count, scratch)
    if count == _NO_POOL and min_p > 0.0:
        count = gather(logits, temperature, inverse, math.log(min_p) - _SLACK, scratch)
    return count, total


@inner
def _restrict(row: Any, logits: Logits, inverse: float, scratch: Scratch) -> int:
    """Make a pool of what top-k and top-n-sigma leave; neither depends on the temperature.

    Top-n-sigma (Tang et al., 2024) keeps logits within so many population standard deviations, taken over all ids that
    are not forbidden, of the largest. Top-k keeps exactly k ids.
    """
    top_k, sigmas = row.top_k, row.top_n_sigma
    restricts = 0 < top_k < logits.vocab
    if not restricts and sigmas <= 0.0:
        return _NO_POOL
    count = largest(logits, top_k if restricts else logits.vocab, scratch)
    if sigmas > 0.0:
        limit = logits.top - sigmas * deviation(logits, scratch)
        kept = 0
        for i in range(count):
            token = read_i32(scratch.ids, i)
            if np.float64(read_f32(logits.at, token)) >= limit:
                write_i32(scratch.ids, kept, token)
                kept += 1
        count = kept
    return weigh_pool(logits, inverse, count, scratch)


@inner
def _moment_of_pool(count: int, scratch: Scratch) -> float:
    moment = 0.0
    for i in range(count):
        moment -= read_f64(scratch.keys, i) * read_f64(scratch.weights, i)
    return moment


@inner
def _typical(
    mass: float, logits: Logits, temperature: float, inverse: float, total: float, moment: float, count: int,
    scratch: Scratch,
) -> int:  # fmt: skip
    """Locally typical (Meister et al., 2023): the ids whose surprise is nearest the entropy, until they hold `mass`.

    `total` and `moment` are sums of weights, and of weights times scaled logits; `count` the pool's size, or _NO_POOL.
    """
    entropy = math.log(total) - moment / total
    if count == _NO_POOL:
        # All ids of surprise above ln(size / (1 - mass)) hold less than 1 - mass together. That is above the entropy,
        # so where no likelier id is as far from it on the other side, they come last and are not reached.
        rarest = math.log(logits.vocab / max(1.0 - mass, _LEAST_REST))
        reached = entropy - math.log(total) <= rarest - entropy
        floor = math.log(total) - rarest - _SLACK if reached else NO_WEIGHT
        count = gather(logits, temperature, inverse, floor, scratch)
    typical = entropy - math.log(total)  # the key of an id whose surprise is the entropy
    for i in range(count):
        write_f64(scratch.keys, i, abs(read_f64(scratch.keys, i) - typical))
    return weigh_pool(logits, inverse, keep_prefix(mass * total, count, scratch), scratch)


@inner
def _exclude_of_pool(threshold: float, count: int, scratch: Scratch) -> int:
    """XTC (p-e-w, 2024) once it acts: of the ids of probability `threshold` or more, the least probable alone stays."""
    least = threshold * sum_of(scratch.weights, count)
    high, last = 0, 0
    for i in range(count):
        if read_f64(scratch.weights, i) >= least:
            if high == 0 or read_f64(scratch.keys, i) >= read_f64(scratch.keys, last):
                last = i
            high += 1
    if high < 2:
        return count
    kept = 0
    for i in range(count):
        if read_f64(scratch.weights, i) < least or i == last:
            move(scratch, i, kept)
            kept += 1
    return kept


@inner
def _exclude(logits: Logits, temperature: float, inverse: float, least: float, scratch: Scratch) -> Logits:
    """XTC over all ids: where several have weight `least` or more, forbid all of them but the least probable.

    The result lies in `adjusted`; its largest is still that of all, for their weights are up to a factor.
    """
    count = gather(logits, temperature, inverse, math.log(max(least, math.exp(NO_WEIGHT))) - _SLACK, scratch)
    count = keep_weights(least, count, scratch)
    if count < 2:
        return logits
    if logits.at != scratch.adjusted:
        copy(logits.at, scratch.adjusted, logits.vocab)
    last = 0
    for i in range(count):
        if read_f64(scratch.keys, i) >= read_f64(scratch.keys, last):
            last = i
    for i in range(count):
        if i != last:
            write_f32(scratch.adjusted, read_i32(scratch.ids, i), np.float32(-np.inf))
    return Logits(scratch.adjusted, logits.vocab, logits.tops, logits.best, logits.top)


@inner
def draw_mirostat(row: Any, position: int, logits: Logits, scratch: Scratch) -> tuple[int, float]:
    """Mirostat 2 (Basu et al., 2021): an id of at most mu bits of surprise, or else the likeliest; the next mu."""
    temperature, mu = row.temperature, row.mu
    inverse = inverse_of(temperature)
    total, _ = weigh_all(logits, inverse, scratch)
    floor = math.log(total) - mu * _LN2
    count = gather(logits, temperature, inverse, min(floor, 0.0), scratch)
    kept = 0
    for i in range(count):
        if -read_f64(scratch.keys, i) >= floor:
            move(scratch, i, kept)
            kept += 1
    if kept == 0:
        write_i32(scratch.ids, 0, logits.best)
        kept = weigh_pool(logits, inverse, 1, scratch)
    index = draw(uniform_of(row, position, _DRAW_TOKEN), kept, scratch)
    surprise = math.log2(sum_of(scratch.weights, kept) / read_f64(scratch.weights, index))
    return read_i32(scratch.ids, index), mu - row.mirostat_eta * (surprise - row.mirostat_tau)


@kernel()
def draw_row(address: int, thread: int, threads: int) -> None:
    call = CALL(address)
    row, position = ROW(call.row), call.position
    scratch = place_scratch(call.scratch, call.vocab)
    logits = logits_of(call, scratch)
    if row.mirostat == 0:
        call.token = draw_token(row, position, logits, scratch)
    else:
        token, mu = draw_mirostat(row, position, logits, scratch)
        call.token = token
        call.new_mu = mu
