"""Sampling of all rows of a step at once, on the device. torch.

Read `sampler.py` first: `DeviceSampler` keeps the rows' parameters in tables and chooses their next tokens. It applies,
in this order, `penalties.py` and `dry.py` (changes of single logits), then `truncation.py` (temperature, top-k, top-p,
min-p and the draw, in float64). `logprobs.py` reduces log-probabilities on the device. `positions.py` says at which
places of a step tokens are chosen; there are several for a row with drafts. Results agree with `backends/cpu/sampling`,
the reference.
"""
