"""A mixture's choice of experts, its tokens sorted by expert, and the sum of what the chosen ones make of them.

A pair is a token and one expert that it goes through. Pairs lie sorted by expert and then by token: each expert's begin
a new block of activation records, so that the tiles of dense matmuls read them. A pair's place there is its position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, types

from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.normalize import copy_record
from realizar.backends.cpu.kernels.quantize import offset_of
from realizar.backends.cpu.memory import inner, load_f32, load_i64, view
from realizar.backends.cpu.records import Record

ITEM_FIELDS = 4
ITEM_EXPERT, ITEM_POSITION, ITEM_PAIRS, ITEM_COST = range(ITEM_FIELDS)
"""An item: some pairs of one expert, whose activations stay in the second-level cache while its tiles pass. Its cost is
that of all items before it; one more item ends the list with the cost of all."""
COUNT_FIELDS = 4
COUNT_ITEMS, COUNT_EXPERTS, COUNT_READ, COUNT_SORTED = range(COUNT_FIELDS)
"""Fields of `counts`: items, and experts that at least one token chose; the sum of these over all mixtures of all steps
since somebody set it to zero, and how many there were."""
LEAST_COST = 8  # reading a tile of weights takes as long as multiplying it with some tokens

# chosen int32, weights float32 [tokens, per_token]; bias and expert_scales float32 [experts], or 0
CHOOSE = Record(
    "step count_field scores scores_stride experts per_token normalized scale chosen weights sigmoid bias groups "
    "groups_per_token expert_scales"
)
_STEP, _COUNT, _SCORES, _SCORES_STRIDE, _EXPERTS, _PER_TOKEN, _NORMALIZED, _SCALE, _CHOSEN, _WEIGHTS = range(10)
_SIGMOID, _BIAS, _GROUPS_OF_EXPERTS, _GROUPS_PER_TOKEN, _EXPERT_SCALES = range(10, 15)
_TAKEN = -1.0  # less than any score


@inner
def _score(scores: Any, sigmoid: int) -> None:
    if sigmoid != 0:
        for i in range(scores.size):
            scores[i] = np.float32(1.0) / (np.float32(1.0) + np.exp(-scores[i]))
        return
    largest, total = scores[0], np.float32(0.0)
    for i in range(1, scores.size):
        largest = max(largest, scores[i])
    for i in range(scores.size):
        scores[i] = np.exp(scores[i] - largest)
        total += scores[i]
    for i in range(scores.size):
        scores[i] /= total


@inner
def _rank(scores: Any, bias: int, i: int) -> float:
    return scores[i] if bias == 0 else scores[i] + view(bias, scores.size, np.float32)[i]


@inner
def _limit_groups(scores: Any, bias: int, sums: Any, kept: int) -> None:
    """Take the experts of all groups but the `kept` whose two highest ranks have the highest sums. sums: scratch."""
    size = scores.size // sums.size
    for group in range(sums.size):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for i in range(group * size, (group + 1) * size):
            rank = _rank(scores, bias, i)
            if rank > first:
                first, second = rank, first
            elif rank > second:
                second = rank
        sums[group] = first if size == 1 else first + second
    for _ in range(sums.size - kept):
        worst = -1
        for group in range(sums.size - 1, -1, -1):  # of equal sums the later group is left out
            if not np.isnan(sums[group]) and (worst < 0 or sums[group] < sums[worst]):
                worst = group
        if worst < 0:
            return
        sums[worst] = np.nan
        for i in range(worst * size, (worst + 1) * size):
            scores[i] = _TAKEN


@cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
def choose(arguments: int, thread: int, threads: int) -> None:
    """The kernel of `CHOOSE`: scores, then the highest ranks; tokens are divided among threads.

    Of equal ranks the expert with the lowest index goes first. Scores that are NaN choose the first experts.
    """
    tokens = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
    experts, per_token = load_i64(arguments, _EXPERTS), load_i64(arguments, _PER_TOKEN)
    scale, bias, groups = (
        load_f32(arguments, _SCALE),
        load_i64(arguments, _BIAS),
        load_i64(arguments, _GROUPS_OF_EXPERTS),
    )
    sums = np.empty(groups, np.float32)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        row = load_i64(arguments, _SCORES) + token * load_i64(arguments, _SCORES_STRIDE)
        scores = view(row, experts, np.float32)
        chosen = view(load_i64(arguments, _CHOSEN) + token * per_token * 4, per_token, np.int32)
        weights = view(load_i64(arguments, _WEIGHTS) + token * per_token * 4, per_token, np.float32)
        _score(scores, load_i64(arguments, _SIGMOID))
        if groups > 1:
            _limit_groups(scores, bias, sums, load_i64(arguments, _GROUPS_PER_TOKEN))
        total = np.float32(0.0)
        for slot in range(per_token):
            best = -1
            for i in range(experts):
                if not scores[i] < 0 and (best < 0 or _rank(scores, bias, i) > _rank(scores, bias, best)):
                    best = i
            chosen[slot], weights[slot] = best, scores[best]
            total += scores[best]
            scores[best] = np.float32(_TAKEN)
        for slot in range(per_token):
            if load_i64(arguments, _NORMALIZED) != 0:
                weights[slot] /= total + np.float32(1e-20)  # sigmoids may all be zero
            weights[slot] *= scale
            if load_i64(arguments, _EXPERT_SCALES) != 0:
                weights[slot] *= view(load_i64(arguments, _EXPERT_SCALES), experts, np.float32)[chosen[slot]]


# positions int32 [tokens, per_token], starts int64 [experts], items int64 [items + 1, ITEM_FIELDS]
SORT = Record("step count_field experts per_token chosen positions starts items counts width run")
_, _, _S_EXPERTS, _S_PER_TOKEN, _S_CHOSEN, _POSITIONS, _STARTS, _ITEMS, _COUNTS, _WIDTH, _RUN = range(11)


@cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
def sort_by_expert(arguments: int, thread: int, threads: int) -> None:
    """The kernel of `SORT`: the first thread counts, and gives each pair its position and each expert its items."""
    if thread != 0:
        return
    tokens = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
    experts, pairs = load_i64(arguments, _S_EXPERTS), tokens * load_i64(arguments, _S_PER_TOKEN)
    chosen = view(load_i64(arguments, _S_CHOSEN), pairs, np.int32)
    positions = view(load_i64(arguments, _POSITIONS), pairs, np.int32)
    starts = view(load_i64(arguments, _STARTS), experts, np.int64)
    counts = view(load_i64(arguments, _COUNTS), COUNT_FIELDS, np.int64)
    width, run = load_i64(arguments, _WIDTH), load_i64(arguments, _RUN)
    for expert in range(experts):
        starts[expert] = 0
    for pair in range(pairs):
        starts[chosen[pair]] += 1
    items, used, position, cost = 0, 0, 0, 0
    for expert in range(experts):
        own = starts[expert]
        starts[expert] = position
        for first in range(0, own, run):
            item = view(load_i64(arguments, _ITEMS) + items * ITEM_FIELDS * 8, ITEM_FIELDS, np.int64)
            some = min(run, own - first)
            item[ITEM_EXPERT], item[ITEM_POSITION], item[ITEM_PAIRS] = expert, position + first, some
            item[ITEM_COST] = cost
            cost += max(some, LEAST_COST)
            items += 1
        used += own > 0
        position += (own + width - 1) // width * width
    view(load_i64(arguments, _ITEMS) + items * ITEM_FIELDS * 8, ITEM_FIELDS, np.int64)[ITEM_COST] = cost
    counts[COUNT_ITEMS], counts[COUNT_EXPERTS] = items, used
    counts[COUNT_READ] += used
    counts[COUNT_SORTED] += 1
    for pair in range(pairs):
        positions[pair] = starts[chosen[pair]]
        starts[chosen[pair]] += 1


# float32 rows are copied where `out` is not 0, records where `out_records` is not
GATHER = Record(
    "step count_field per_token positions input input_stride columns out out_stride records out_records groups width"
)
_, _, _G_PER_TOKEN, _G_POSITIONS, _IN, _IN_STRIDE, _COLUMNS = range(7)
_OUT, _OUT_STRIDE, _RECORDS, _OUT_RECORDS, _GROUPS, _G_WIDTH = range(7, 13)


@cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
def gather(arguments: int, thread: int, threads: int) -> None:
    """The kernel of `GATHER`: each token's activations to the positions of its pairs; tokens are divided."""
    tokens = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
    per_token, columns = load_i64(arguments, _G_PER_TOKEN), load_i64(arguments, _COLUMNS)
    positions = view(load_i64(arguments, _G_POSITIONS), max(tokens * per_token, 1), np.int32)
    out, records, out_records = (
        load_i64(arguments, _OUT), load_i64(arguments, _RECORDS), load_i64(arguments, _OUT_RECORDS),
    )  # fmt: skip
    groups, width = load_i64(arguments, _GROUPS), load_i64(arguments, _G_WIDTH)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        source = view(load_i64(arguments, _IN) + token * load_i64(arguments, _IN_STRIDE), columns, np.float32)
        for slot in range(per_token):
            position = positions[token * per_token + slot]
            if out != 0:
                target = view(out + position * load_i64(arguments, _OUT_STRIDE), columns, np.float32)
                for i in range(columns):
                    target[i] = source[i]
            if out_records != 0:
                for group in range(groups):
                    copy_record(
                        records + offset_of(token, group, groups, width),
                        out_records + offset_of(position, group, groups, width),
                    )


# out = the sum, or out += scale * the sum where `add`; `shared` and `shared_gate` are 0 where there are none
SUM = Record(
    "step count_field per_token positions weights input input_stride width out out_stride add scale shared "
    "shared_stride shared_gate shared_gate_stride"
)
_, _, _P_PER_TOKEN, _P_POSITIONS, _P_WEIGHTS, _P_IN, _P_IN_STRIDE, _P_WIDTH = range(8)
_P_OUT, _P_OUT_STRIDE, _P_ADD, _P_SCALE, _P_SHARED, _P_SHARED_STRIDE, _P_GATE, _P_GATE_STRIDE = range(8, 16)


@cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
def sum_experts(arguments: int, thread: int, threads: int) -> None:
    """The kernel of `SUM`: a token's pairs times their weights, the highest rank first, then the shared expert's.

    Tokens are divided. The sum is made in the row of the token's first pair, which nothing reads afterwards.
    """
    tokens = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
    per_token, width = load_i64(arguments, _P_PER_TOKEN), load_i64(arguments, _P_WIDTH)
    positions = view(load_i64(arguments, _P_POSITIONS), max(tokens * per_token, 1), np.int32)
    weights = view(load_i64(arguments, _P_WEIGHTS), max(tokens * per_token, 1), np.float32)
    at, stride, scale = load_i64(arguments, _P_IN), load_i64(arguments, _P_IN_STRIDE), load_f32(arguments, _P_SCALE)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        pair = token * per_token
        total = view(at + positions[pair] * stride, width, np.float32)
        for i in range(width):
            total[i] *= weights[pair]
        for slot in range(1, per_token):
            values = view(at + positions[pair + slot] * stride, width, np.float32)
            for i in range(width):
                total[i] += weights[pair + slot] * values[i]
        if load_i64(arguments, _P_SHARED) != 0:
            factor, gate = np.float32(1.0), load_i64(arguments, _P_GATE)
            if gate != 0:
                logit = view(gate + token * load_i64(arguments, _P_GATE_STRIDE), 1, np.float32)[0]
                factor /= np.float32(1.0) + np.exp(-logit)
            values = view(
                load_i64(arguments, _P_SHARED) + token * load_i64(arguments, _P_SHARED_STRIDE), width, np.float32
            )
            for i in range(width):
                total[i] += factor * values[i]
        out = view(load_i64(arguments, _P_OUT) + token * load_i64(arguments, _P_OUT_STRIDE), width, np.float32)
        if load_i64(arguments, _P_ADD) != 0:
            for i in range(width):
                out[i] += scale * total[i]
        else:
            for i in range(width):
                out[i] = total[i]
