"""Sampling of one row at a time. numpy only; the reference for sampling on the GPU.

Read `step_reader.py` first: it takes the largest logit of the rows that want nothing else, and gives each other row a
reader of its own, of `logit_reader.py`. `sampler.py` then chooses a token: it applies
`penalties.py` and `dry.py` (changes of single logits), `truncation.py` (temperature, top-k, top-p, min-p and others,
with `select.py` for selections without a sort), and draws. `logprobs.py` has log-probabilities.
"""
