"""Log-probabilities of the model's own distribution, for sampled tokens and for prompt scoring."""

from __future__ import annotations

import math

import numpy as np

from realizar.backends.cpu.codegen.logit_blocks import BLOCK
from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.kernels.sampling.logits import Logits, key_at, logits_of, weigh_all
from realizar.backends.cpu.kernels.sampling.pool import largest, sort
from realizar.backends.cpu.kernels.sampling.record import CALL, place_scratch
from realizar.backends.cpu.memory import inner, read_f32, read_i32, write_f64, write_i32


@inner
def _count_before(logits: Logits, token: int) -> int:
    """Ids that come before one in the order of their logits."""
    key, count = key_at(logits.at, token), 0
    for first in range(0, logits.vocab, BLOCK):
        if read_i32(logits.tops, first // BLOCK) >= key:
            for i in range(first, min(first + BLOCK, logits.vocab)):
                other = key_at(logits.at, i)
                count += other > key or (other == key and i < token)
    return count


@kernel()
def score(address: int, thread: int, threads: int) -> None:
    """The kernel of a `CALL` for the log-probability and rank of an id, and of the `top_n` most probable ids.

    The list has the best first, equal ones by lower id. Ranks follow its order: 1 + larger logits + equal logits of
    lower ids. `token` -1 takes the most probable id. `ids` int32 [2 + top_n] gets the id, its rank and the list's ids,
    `values` float64 [1 + top_n] their log-probabilities.
    """
    call = CALL(address)
    scratch = place_scratch(call.scratch, call.vocab)
    logits, token = logits_of(call, scratch), call.token
    top_n, ids = call.top_n, call.ids
    values = call.values
    total, _ = weigh_all(logits, 1.0, scratch)
    normaliser = logits.top + math.log(total)
    token_id = logits.best if token < 0 else token
    write_i32(ids, 0, token_id)
    write_i32(ids, 1, 1 + _count_before(logits, token_id))
    write_f64(values, 0, np.float64(read_f32(logits.at, token_id)) - normaliser)
    count = largest(logits, top_n, scratch) if top_n > 0 else 0
    for i in range(count):
        write_i32(scratch.order, i, i)
        write_f64(scratch.keys, i, -np.float64(read_f32(logits.at, read_i32(scratch.ids, i))))
    sort(scratch.order, scratch.keys, count)
    for i in range(count):
        token = read_i32(scratch.ids, read_i32(scratch.order, i))
        write_i32(ids, 2 + i, token)
        write_f64(values, 1 + i, np.float64(read_f32(logits.at, token)) - normaliser)
