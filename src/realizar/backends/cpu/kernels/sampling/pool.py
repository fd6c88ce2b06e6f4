"""The pool: ids that may still be sampled, ascending, gathered into a thread's scratch; and selections among them.

`keys` are (top - logit) / temperature, and `weights` the exponentials of their negatives, all above 0.
"""

from __future__ import annotations

import numpy as np

from realizar.backends.cpu.codegen.logit_blocks import BLOCK, LISTED, NO_WEIGHT, weigh_listed
from realizar.backends.cpu.kernels.sampling.logits import Logits, key_at, logit_of, scaled_at, weigh
from realizar.backends.cpu.kernels.sampling.record import BINS, Scratch
from realizar.backends.cpu.memory import inner, read_f32, read_f64, read_i32, write_f32, write_f64, write_i32

_FEW = 128  # ids that are sorted without a histogram
_LARGEST = float(np.finfo(np.float32).max)
_LOWEST = -0x7F800001  # the key of -inf


@inner
def collect(logits: Logits, least: float, key: int, ids: int) -> int:
    """Write the ids whose logit is at least `least` in order, int32; returns how many.

    Blocks whose largest key is less than `key`, that of `least`, are skipped.
    """
    count = 0
    for first in range(0, logits.vocab, BLOCK):
        if read_i32(logits.tops, first // BLOCK) >= key:
            for i in range(first, min(first + BLOCK, logits.vocab)):
                write_i32(ids, count, i)  # one after the last is written over, or never read
                count += read_f32(logits.at, i) >= least
    return count


@inner
def move(scratch: Scratch, source: int, target: int) -> None:
    write_i32(scratch.ids, target, read_i32(scratch.ids, source))
    write_f64(scratch.keys, target, read_f64(scratch.keys, source))
    write_f64(scratch.weights, target, read_f64(scratch.weights, source))


@inner
def weigh_pool(logits: Logits, inverse: float, count: int, scratch: Scratch) -> int:
    """Keys and weights of the first `count` ids; returns how many have weight, and stay."""
    groups = count // LISTED
    if groups > 0:
        weigh_listed(logits.at, scratch.ids, groups, logits.top, inverse, scratch.keys, scratch.weights)
    for i in range(groups * LISTED, count):
        scaled = scaled_at(logits, read_i32(scratch.ids, i), inverse)
        write_f64(scratch.keys, i, -scaled)
        write_f64(scratch.weights, i, weigh(scaled))
    place = 0
    while place < count and read_f64(scratch.weights, place) > 0.0:
        place += 1
    kept = place
    for i in range(place, count):
        if read_f64(scratch.weights, i) > 0.0:
            move(scratch, i, kept)
            kept += 1
    return kept


@inner
def gather(logits: Logits, temperature: float, inverse: float, floor: float, scratch: Scratch) -> int:
    """Make a pool of the ids whose scaled logit is at least `floor`, and maybe some a little below; its size."""
    bound = logits.top + max(floor, NO_WEIGHT) * temperature
    bound -= 1e-6 * (abs(logits.top) + abs(bound))  # the bound is rounded to float32
    write_f32(scratch.bins, 0, np.float32(max(bound, -_LARGEST)))
    key, least = key_at(scratch.bins, 0), read_f32(scratch.bins, 0)
    return weigh_pool(logits, inverse, collect(logits, least, key, scratch.ids), scratch)


@inner
def sum_of(values: int, count: int) -> float:
    """The sum of float64 in their order."""
    total = 0.0
    for i in range(count):
        total += read_f64(values, i)
    return total


@inner
def keep_weights(least: float, count: int, scratch: Scratch) -> int:
    """Keep the ids of a pool whose weight is at least `least`; returns how many."""
    kept = 0
    for i in range(count):
        if read_f64(scratch.weights, i) >= least:
            move(scratch, i, kept)
            kept += 1
    return kept


@inner
def _is_before(keys: int, one: int, other: int) -> bool:
    key, other_key = read_f64(keys, one), read_f64(keys, other)
    return key < other_key or (key == other_key and one < other)


@inner
def _sink(order: int, keys: int, start: int, count: int) -> None:
    """Restore the heap below `start`: no parent comes before a child, by (key, index)."""
    parent, moving = start, read_i32(order, start)
    while 2 * parent + 1 < count:
        child = 2 * parent + 1
        if child + 1 < count and _is_before(keys, read_i32(order, child), read_i32(order, child + 1)):
            child += 1
        if not _is_before(keys, moving, read_i32(order, child)):
            break
        write_i32(order, parent, read_i32(order, child))
        parent = child
    write_i32(order, parent, moving)


@inner
def sort(order: int, keys: int, count: int) -> None:
    """Sort indices, int32 at `order`, by (key, index), keys float64 without NaN: a heap sort."""
    for turn in range(count // 2 + count - 1):
        start, end = count // 2 - 1 - turn, count
        if start < 0:  # the heap is there: its first goes behind what is left of it
            start, end = 0, count - 1 - (turn - count // 2)
            first, last = read_i32(order, 0), read_i32(order, end)
            write_i32(order, 0, last)
            write_i32(order, end, first)
        _sink(order, keys, start, end)


@inner
def _bin_of(key: float, low: float, factor: float) -> int:
    return min(np.int64((key - low) * factor), BINS - 1)


@inner
def keep_prefix(target: float, count: int, scratch: Scratch) -> int:
    """Keep the shortest prefix of a pool, by (key, id), whose weight reaches `target`, at least one id; how many.

    A histogram finds the bin of keys in which the target is reached, and that bin's ids alone are sorted.
    """
    low = high = read_f64(scratch.keys, 0)
    for i in range(count):
        low, high = min(low, read_f64(scratch.keys, i)), max(high, read_f64(scratch.keys, i))
    factor, crossing, reached = 0.0, 0, 0.0
    if count > _FEW and high - low > 1e-9:
        factor = BINS / (high - low)
        for place in range(BINS):
            write_f64(scratch.bins, place, 0.0)
        for i in range(count):
            place = _bin_of(read_f64(scratch.keys, i), low, factor)
            write_f64(scratch.bins, place, read_f64(scratch.bins, place) + read_f64(scratch.weights, i))
        while crossing < BINS - 1 and reached + read_f64(scratch.bins, crossing) < target:
            reached += read_f64(scratch.bins, crossing)
            crossing += 1
    members = 0
    for i in range(count):
        if _bin_of(read_f64(scratch.keys, i), low, factor) == crossing:
            write_i32(scratch.order, members, i)
            members += 1
    sort(scratch.order, scratch.keys, members)
    last = 0
    while last < members - 1 and reached + read_f64(scratch.weights, read_i32(scratch.order, last)) < target:
        reached += read_f64(scratch.weights, read_i32(scratch.order, last))
        last += 1
    limit_index, kept = read_i32(scratch.order, last), 0
    limit = read_f64(scratch.keys, limit_index)
    for i in range(count):
        key = read_f64(scratch.keys, i)
        if key < limit or (key == limit and i <= limit_index):
            move(scratch, i, kept)
            kept += 1
    return kept


@inner
def _select(values: int, count: int, place: int) -> int:
    """The value that would lie at `place` of int32 sorted downwards; they are reordered. Hoare's selection."""
    low, high = 0, count - 1
    while low < high:
        pivot = read_i32(values, (low + high) // 2)
        i, j = low, high
        while i <= j:
            while read_i32(values, i) > pivot:
                i += 1
            while read_i32(values, j) < pivot:
                j -= 1
            if i <= j:
                former = read_i32(values, i)
                write_i32(values, i, read_i32(values, j))
                write_i32(values, j, former)
                i += 1
                j -= 1
        if place <= j:
            high = j
        elif place >= i:
            low = i
        else:
            break
    return read_i32(values, place)


@inner
def largest(logits: Logits, wanted: int, scratch: Scratch) -> int:
    """Write the ids of the `wanted` largest logits, in order, into the pool's ids; of equal ones the lowest stay.

    The largest of so many blocks are a lower bound: only ids that reach it are looked at.
    """
    vocab, blocks = logits.vocab, (logits.vocab + BLOCK - 1) // BLOCK
    if wanted >= vocab:
        for i in range(vocab):
            write_i32(scratch.ids, i, i)
        return vocab
    bound = _LOWEST
    if wanted <= blocks // 2:
        for block in range(blocks):
            write_i32(scratch.order, block, read_i32(logits.tops, block))
        bound = _select(scratch.order, blocks, wanted - 1)
    count = collect(logits, logit_of(bound, scratch.bins), bound, scratch.ids)
    for i in range(count):
        write_i32(scratch.order, i, key_at(logits.at, read_i32(scratch.ids, i)))
    limit, equal, kept = _select(scratch.order, count, wanted - 1), wanted, 0
    for i in range(count):
        equal -= key_at(logits.at, read_i32(scratch.ids, i)) > limit
    for i in range(count):
        token = read_i32(scratch.ids, i)
        key = key_at(logits.at, token)
        if key > limit or (key == limit and equal > 0):
            equal -= key == limit
            write_i32(scratch.ids, kept, token)
            kept += 1
    return kept


@inner
def draw(uniform: float, count: int, scratch: Scratch) -> int:
    """Index of the first id of a pool whose cumulated share of the weight exceeds `uniform`, in [0, 1)."""
    target, cumulated = uniform * sum_of(scratch.weights, count), 0.0
    for i in range(count):
        cumulated += read_f64(scratch.weights, i)
        if cumulated > target:
            return i
    return count - 1
