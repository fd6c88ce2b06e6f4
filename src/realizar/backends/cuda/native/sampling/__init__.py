"""CUDA C++: the sampler's kernels, put together by `source.py` as one text.

Read in this order: `rows.cu` (rows, sampled tokens, integer weights), `sampled.cu` (those of a captured step),
`adjust.cu` (mask, bias, penalties, DRY), `weigh.cu` (passes of many blocks), `gather.cu` (ids near a truncation's end),
`select.cu` and `cut.cu` (truncations and lists of log-probabilities), `pick.cu` (the draw, the rows' state).
"""
