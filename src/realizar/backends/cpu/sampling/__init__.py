"""Sampling of one row at a time. numpy only; the reference for sampling on the GPU.

Read `logit_reader.py` first: one row's use of a step's logits. `sampler.py` then chooses a token: it applies
`penalties.py` and `dry.py` (changes of single logits), `truncation.py` (temperature, top-k, top-p, min-p and others,
with `select.py` for selections without a sort), and draws. `logprobs.py` has log-probabilities.
"""
