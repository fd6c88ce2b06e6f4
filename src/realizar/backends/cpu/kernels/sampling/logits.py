"""A row's logits with the largest of each block, and their weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from realizar.backends.cpu.codegen.logit_blocks import BLOCK, NO_WEIGHT, find_tops, sum_blocks, weigh_blocks
from realizar.backends.cpu.kernels.sampling.record import Scratch
from realizar.backends.cpu.memory import inner, read_f32, read_f64, read_i32, write_f64, write_i32

_HIGHEST, _LOWEST = 0x7F800000, -0x7F800001  # keys of the infinities
_LEAST_KEY = -(1 << 31)
_MOST_INVERSE = 1e300


class Logits(NamedTuple):
    """Logits that a token is sampled from: float32 [vocab] at `at`, and keys of blocks, int32 [blocks], at `tops`.

    `best` is the id of the largest, the lowest of several; `top` is NaN where any is NaN.
    """

    at: int
    vocab: int
    tops: int
    best: int
    top: float


@inner
def logits_of(call: Any, scratch: Scratch) -> Logits:
    """Those of a `CALL`, whose largest of blocks lie in `scratch`."""
    at, vocab = call.logits, call.vocab
    return Logits(at, vocab, scratch.tops, call.best, call.top)


@inner
def key_at(at: int, index: int) -> int:
    """The logit as an integer: they order alike, and -0 equals 0."""
    bits = read_i32(at, index)
    if bits >= 0:
        return bits
    return bits ^ 0x7FFFFFFF if bits != _LEAST_KEY else 0


@inner
def logit_of(key: int, room: int) -> float:
    """The logit of a key, by way of four bytes of memory."""
    write_i32(room, 0, key if key >= 0 else key ^ 0x7FFFFFFF)
    return read_f32(room, 0)


@inner
def find_largest(at: int, vocab: int, tops: int) -> Logits:
    blocks = vocab // BLOCK
    least, most = _HIGHEST, _LEAST_KEY
    if blocks > 0:
        least = find_tops(at, blocks, tops)
    for i in range(blocks * BLOCK, vocab):
        key = key_at(at, i)
        least, most = min(least, key), max(most, key)
    write_i32(tops, blocks, most)
    for block in range(blocks):
        most = max(most, read_i32(tops, block))
    if most > _HIGHEST or least < _LOWEST:
        return Logits(at, vocab, tops, 0, math.nan)
    block = 0
    while read_i32(tops, block) < most:
        block += 1
    best = block * BLOCK
    while key_at(at, best) < most:
        best += 1
    return Logits(at, vocab, tops, best, np.float64(read_f32(at, best)))


@inner
def inverse_of(temperature: float) -> float:
    """1 / temperature, finite."""
    return min(1.0 / max(temperature, 1.0 / _MOST_INVERSE), _MOST_INVERSE)


@inner
def scaled_at(logits: Logits, index: int, inverse: float) -> float:
    """(logit - top) / temperature, at least NO_WEIGHT."""
    return max((np.float64(read_f32(logits.at, index)) - logits.top) * inverse, NO_WEIGHT)


@inner
def weigh(scaled: float) -> float:
    """exp(scaled), and 0 at NO_WEIGHT."""
    return math.exp(scaled) if scaled > NO_WEIGHT else 0.0


@inner
def weigh_all(logits: Logits, inverse: float, scratch: Scratch) -> tuple[float, float]:
    """Weights of all blocks, into `sums` and `moments`; returns their totals."""
    blocks = logits.vocab // BLOCK
    if blocks > 0:
        weigh_blocks(logits.at, blocks, logits.top, inverse, scratch.sums, scratch.moments)
    total = moment = 0.0
    for i in range(blocks * BLOCK, logits.vocab):
        scaled = scaled_at(logits, i, inverse)
        weight = weigh(scaled)
        total += weight
        moment += weight * scaled
    write_f64(scratch.sums, blocks, total)
    for block in range(blocks):
        total += read_f64(scratch.sums, block)
        moment += read_f64(scratch.moments, block)
    return total, moment


@inner
def draw_of_all(logits: Logits, inverse: float, uniform: float, total: float, scratch: Scratch) -> int:
    """The first id, in order, whose cumulated share of the weight exceeds `uniform`, after `weigh_all`."""
    blocks = logits.vocab // BLOCK
    target, before, block, last = uniform * total, 0.0, 0, 0
    for i in range(blocks + 1):
        if read_f64(scratch.sums, i) > 0.0:
            last = i
    while block < last and before + read_f64(scratch.sums, block) <= target:
        before += read_f64(scratch.sums, block)
        block += 1
    found = -1
    for i in range(block * BLOCK, min(block * BLOCK + BLOCK, logits.vocab)):
        weight = weigh(scaled_at(logits, i, inverse))
        if weight > 0.0:
            found = i  # the block's two sums may differ in their last bits: then its last id of any weight
            before += weight
            if before > target:
                break
    return found


@inner
def _sum_differences(logits: Logits, mean: float, sums: int) -> None:
    blocks = logits.vocab // BLOCK
    count = total = squares = 0.0
    if blocks > 0:
        sum_blocks(logits.at, blocks, mean, sums)
        count, total, squares = read_f64(sums, 0), read_f64(sums, 1), read_f64(sums, 2)
    for i in range(blocks * BLOCK, logits.vocab):
        if read_f32(logits.at, i) > -np.inf:
            away = np.float64(read_f32(logits.at, i)) - mean
            count, total, squares = count + 1.0, total + away, squares + away * away
    write_f64(sums, 0, count)
    write_f64(sums, 1, total)
    write_f64(sums, 2, squares)


@inner
def deviation(logits: Logits, scratch: Scratch) -> float:
    """Population standard deviation of all logits that are not forbidden."""
    mean = logits.top
    for _ in range(2):  # differences from the mean, which the first turn finds
        _sum_differences(logits, mean, scratch.bins)
        mean += read_f64(scratch.bins, 1) / read_f64(scratch.bins, 0)
    return math.sqrt(read_f64(scratch.bins, 2) / read_f64(scratch.bins, 0))
