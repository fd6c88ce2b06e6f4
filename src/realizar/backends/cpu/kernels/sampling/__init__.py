"""Sampling of tokens as compiled code, a row of logits at a time: `sample.py` has the kernel that a step calls.

`record.py` and `row_state.py` are what it reads of a row. `logits.py` finds the largest of each block, by which later
passes skip blocks; `pool.py` holds the few ids that a truncation can keep. `adjust.py` and `dry.py` change single
logits, `truncate.py` draws, `logprobs.py` has log-probabilities.
"""
