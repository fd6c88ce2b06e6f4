"""The choice of tokens as compiled code, a row of logits at a time: `choose.py` has the kernel that a step calls.

`record.py`: what the kernel reads of a row and of its part in a step. `row_state.py`: what a row's state says of its
next choice. `logits.py`: one pass over a row's logits finds the largest of each block, by which later passes skip
blocks, and one more their weights. `pool.py`: the few ids that a truncation can keep, and selections among them without
a sort of the vocabulary. `adjust.py` and `dry.py` change single logits, `truncate.py` draws with the numbers of
`philox.py`, `logprobs.py` has log-probabilities.
"""
