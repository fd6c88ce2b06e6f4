"""Sampling of all rows of a step at once, on the device. torch.

There are two samplers, behind one interface: `step_sampler.py`. Both cut the choices of rows with drafts at the ends of
their outputs by `ends.py`.

By CUDA kernels, on NVIDIA cards from Ampere on, as `native_choices.py`: `native_rows.py` keeps the rows' parameters
where kernels read them, `native_buffers.py` the memory of a step's choices, `native_kernels.py` compiles and starts the
kernels, whose text is in `native/sampling/`, and `native_graphs.py` has them as graphs for steps of decodes. The device
reads grammars' masks where other processes write them (`shared_masks.py`). Weights are integers of 64 bits there, so
that sums are the same in any order, and truncations find their bounds by histograms, without a sort.

By torch, as `choices.py`, on other devices, in float64, as the kernels' reference. Read `sampler.py` first:
`DeviceSampler` keeps the rows' parameters in tables and chooses their next tokens. It applies, in this order,
`penalties.py` and `dry.py` (changes of single logits), then `truncation.py` (temperature, top-k, top-p, min-p and the
draw). `positions.py` says at which places of a step tokens are chosen; there are several for a row with drafts, whose
drafts `verify.py` compares with the choices. `logprobs.py` reduces log-probabilities. Results agree with
`tests/backends/reference_sampler`, the reference of both.
"""
