"""Triton kernels: everything but the quantised matmuls and attention's fast path. All run under Triton's interpreter.

A step meets them in this order:

1. `fetch.py`: the step's integers come to the device; `go_on.py`: they become those of a drafter's next step.
   `embed.py`: the embedding of its tokens.
2. `normalize.py`: residual add, norm, and the next matmul's input; `normalize_parallel.py` around experts parallel to a
   dense feed-forward. `store_inputs.py` writes each input format.
3. `rotate.py`, `heads.py`: QK norm, rope, and keys and values into the cache.
4. `attend.py` (chunks), `attend_decode.py` (single tokens), `attend_parts.py` (these too, with `batch_invariant`).
   `recurrences/`: layers with a state. `gate_heads.py`: the output gates of these and of attention.
5. `activate.py`, or `experts.py` and `shared_expert.py`: feed-forwards. `choose.py`: logits and the largest of each
row.

`plain_matmul.py`, for GPUs without the CUDA C++ kernels, and `embed.py` read weights by `plain_weights.py`; the former
multiplies float weights too, in one order. `reduce.py` sums a matmul's splits, `exchange.py` those of several GPUs;
`dependent.py` has programmatic dependent launch. `places.py` moves blocks and snapshots out of the cache, and back,
between steps. `launched.py` makes those that the host launches, and `ahead.py` has them compiled before.
"""
