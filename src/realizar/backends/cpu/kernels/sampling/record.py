"""What the sampling kernel reads: a row's parameters and state, and a run of its tokens in a step. All int64 fields.

Fields that are float64 say so; their bits lie in the integer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from realizar.backends.cpu.codegen.logit_blocks import BLOCK
from realizar.backends.cpu.memory import inner
from realizar.backends.cpu.records import Record
from realizar.sampling_params import SAMPLERS

BINS = 1024  # of a histogram over a pool's keys

# A row. Lists are addresses and lengths; address 0 is an empty list. `counted` are the ids that were seen, with their
# counts in the output. DRY's tokens and match lengths are int32, with room for `dry_places` tokens. `mu` is float64.
# Samplers' parameters come last, float64 where they are no integers; kernels name the slots of those that they read.
_FIELDS = (
    "seed choice greedy min_tokens ends_early outputs logprobs mu=f64 "
    "bias_ids biases num_biases end_ids num_ends "
    "counted counts num_counted "
    "dry_tokens dry_lengths dry_found dry_matched dry_size dry_places breakers num_breakers"
)
ROW = Record(" ".join([_FIELDS, *(each.name + ("" if each.kind is int else "=f64") for each in SAMPLERS)]))

# A run: consecutive tokens of a step whose logits one row wants, read one after another. `row` 0 asks for the
# log-probability of `target` alone, -1 for the most probable id's. `place`: sampled tokens of the row before the run.
# `position`: in the sequence, of the run's first sampled token. `sampled`: int32, the row's from its first one on, and
# `made`: int64, how many there are. `ids` int32 [count, 2 + top_n] and `values` float64 [count, 1 + top_n]:
# log-probabilities. `fault` (int64) becomes one of the faults below.
RUN = Record("row logits count place position drafts mask mask_stride sampled made target top_n ids values fault")
ROW_FIELDS, RUN_BYTES = len(ROW.names), 8 * len(RUN.names)
NO_FAULT, UNUSABLE, NOTHING_ALLOWED, NO_LOGPROBS = range(4)

# `next`: address of the number of the next run that a thread takes. `stride`: bytes of a row of logits. The last are
# addresses of the other kernels.
SAMPLE = Record("runs count next vocab stride scratch scratch_bytes adjust draw score")

# What the other kernels read, and the `token` and `new_mu` (float64) that `draw` writes. `logits`, `best` and `top`
# (float64) are those of `Logits`; `scratch` is a thread's.
CALL = Record("row logits vocab scratch best top=f64 mask position token new_mu=f64 top_n ids values")
_CALL_BYTES = 128


class Scratch(NamedTuple):
    """Addresses of a thread's arrays.

    Attributes:
        tops: int32 [blocks], largest keys. sums, moments: float64 [blocks].
        adjusted: float32 [vocab].
        ids: int32 [vocab], of the pool. keys, weights: float64 [vocab], of the pool.
        order: int32 [vocab]. bins: float64 [BINS].
        call: the record of calls of other kernels, `CALL`.
    """

    tops: int
    sums: int
    moments: int
    adjusted: int
    ids: int
    keys: int
    weights: int
    order: int
    bins: int
    call: Any


def scratch_bytes(vocab: int) -> int:
    """Scratch of one thread, in whole cache lines."""
    blocks = vocab // BLOCK + 1
    return BLOCK * (blocks * 28 + 8 * BINS // BLOCK) + 64 * ((blocks * 20 + 63) // 64) + _CALL_BYTES


@inner
def place_scratch(at: int, vocab: int) -> Scratch:
    """A thread's arrays, one after another."""
    blocks = vocab // BLOCK + 1
    padded = blocks * BLOCK
    keys = at
    weights = keys + 8 * padded
    adjusted = weights + 8 * padded
    ids = adjusted + 4 * padded
    order = ids + 4 * padded
    bins = order + 4 * padded
    call = bins + 8 * BINS
    sums = call + _CALL_BYTES
    moments = sums + 8 * blocks
    return Scratch(moments + 8 * blocks, sums, moments, adjusted, ids, keys, weights, order, bins, CALL(call))
