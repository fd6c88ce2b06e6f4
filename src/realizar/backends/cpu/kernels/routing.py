"""A mixture's choice of experts, its tokens sorted by expert, and the sum of what the chosen ones make of them.

A pair is a token and one expert that it goes through. Pairs lie sorted by expert and then by token: each expert's begin
a new block of activation records, so that the tiles of dense matmuls read them. A pair's place there is its position.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.normalize import copy_record
from realizar.backends.cpu.kernels.quantize import offset_of
from realizar.backends.cpu.memory import copy, inner, read_i64, view
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
    "step count_field scores scores_stride experts per_token normalized scale=f32 chosen weights sigmoid bias groups "
    "groups_per_token expert_scales"
)
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


@kernel()
def choose(address: int, thread: int, threads: int) -> None:
    """The kernel of `CHOOSE`: scores, then the highest ranks; tokens are divided among threads.

    Of equal ranks the expert with the lowest index goes first. Scores that are NaN choose the first experts.
    """
    arguments = CHOOSE(address)
    tokens = read_i64(arguments.step, arguments.count_field)
    experts, per_token = arguments.experts, arguments.per_token
    scale, bias, groups = arguments.scale, arguments.bias, arguments.groups
    sums = np.empty(groups, np.float32)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        row = arguments.scores + token * arguments.scores_stride
        scores = view(row, experts, np.float32)
        chosen = view(arguments.chosen + token * per_token * 4, per_token, np.int32)
        weights = view(arguments.weights + token * per_token * 4, per_token, np.float32)
        _score(scores, arguments.sigmoid)
        if groups > 1:
            _limit_groups(scores, bias, sums, arguments.groups_per_token)
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
            if arguments.normalized != 0:
                weights[slot] /= total + np.float32(1e-20)  # sigmoids may all be zero
            weights[slot] *= scale
            if arguments.expert_scales != 0:
                weights[slot] *= view(arguments.expert_scales, experts, np.float32)[chosen[slot]]


# positions int32 [tokens, per_token], starts int64 [experts], items int64 [items + 1, ITEM_FIELDS]
SORT = Record("step count_field experts per_token chosen positions starts items counts width run")


@kernel()
def sort_by_expert(address: int, thread: int, threads: int) -> None:
    """The kernel of `SORT`: the first thread counts, and gives each pair its position and each expert its items."""
    arguments = SORT(address)
    if thread != 0:
        return
    tokens = read_i64(arguments.step, arguments.count_field)
    experts, pairs = arguments.experts, tokens * arguments.per_token
    chosen = view(arguments.chosen, pairs, np.int32)
    positions = view(arguments.positions, pairs, np.int32)
    starts = view(arguments.starts, experts, np.int64)
    counts = view(arguments.counts, COUNT_FIELDS, np.int64)
    width, run = arguments.width, arguments.run
    for expert in range(experts):
        starts[expert] = 0
    for pair in range(pairs):
        starts[chosen[pair]] += 1
    items, used, position, cost = 0, 0, 0, 0
    for expert in range(experts):
        own = starts[expert]
        starts[expert] = position
        for first in range(0, own, run):
            item = view(arguments.items + items * ITEM_FIELDS * 8, ITEM_FIELDS, np.int64)
            some = min(run, own - first)
            item[ITEM_EXPERT], item[ITEM_POSITION], item[ITEM_PAIRS] = expert, position + first, some
            item[ITEM_COST] = cost
            cost += max(some, LEAST_COST)
            items += 1
        used += own > 0
        position += (own + width - 1) // width * width
    view(arguments.items + items * ITEM_FIELDS * 8, ITEM_FIELDS, np.int64)[ITEM_COST] = cost
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


@kernel()
def gather(address: int, thread: int, threads: int) -> None:
    """The kernel of `GATHER`: each token's activations to the positions of its pairs; tokens are divided."""
    arguments = GATHER(address)
    tokens = read_i64(arguments.step, arguments.count_field)
    per_token, columns = arguments.per_token, arguments.columns
    positions = view(arguments.positions, max(tokens * per_token, 1), np.int32)
    out, records, out_records = arguments.out, arguments.records, arguments.out_records
    groups, width = arguments.groups, arguments.width
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        source = arguments.input + token * arguments.input_stride
        for slot in range(per_token):
            position = positions[token * per_token + slot]
            if out != 0:
                copy(source, out + position * arguments.out_stride, columns)
            if out_records != 0:
                for group in range(groups):
                    record = records + offset_of(token, group, groups, width)
                    copy_record(record, out_records + offset_of(position, group, groups, width))


# out = the sum, or out += scale * the sum where `add`; `shared` and `shared_gate` are 0 where there are none
SUM = Record(
    "step count_field per_token positions weights input input_stride width out out_stride add scale=f32 shared "
    "shared_stride shared_gate shared_gate_stride"
)


@kernel()
def sum_experts(address: int, thread: int, threads: int) -> None:
    """The kernel of `SUM`: a token's pairs times their weights, the highest rank first, then the shared expert's.

    Tokens are divided. The sum is made in the row of the token's first pair, which nothing reads afterwards.
    """
    arguments = SUM(address)
    tokens = read_i64(arguments.step, arguments.count_field)
    per_token, width = arguments.per_token, arguments.width
    positions = view(arguments.positions, max(tokens * per_token, 1), np.int32)
    weights = view(arguments.weights, max(tokens * per_token, 1), np.float32)
    at, stride, scale = arguments.input, arguments.input_stride, arguments.scale
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        pair = token * per_token
        total = view(at + positions[pair] * stride, width, np.float32)
        for i in range(width):
            total[i] *= weights[pair]
        for slot in range(1, per_token):
            values = view(at + positions[pair + slot] * stride, width, np.float32)
            for i in range(width):
                total[i] += weights[pair + slot] * values[i]
        if arguments.shared != 0:
            factor, gate = np.float32(1.0), arguments.shared_gate
            if gate != 0:
                logit = view(gate + token * arguments.shared_gate_stride, 1, np.float32)[0]
                factor /= np.float32(1.0) + np.exp(-logit)
            values = view(arguments.shared + token * arguments.shared_stride, width, np.float32)
            for i in range(width):
                total[i] += factor * values[i]
        out = view(arguments.out + token * arguments.out_stride, width, np.float32)
        if arguments.add != 0:
            for i in range(width):
                out[i] += scale * total[i]
        else:
            for i in range(width):
                out[i] = total[i]
