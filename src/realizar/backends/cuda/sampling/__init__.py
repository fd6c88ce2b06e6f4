"""Sampling of all rows of a step at once, by one of two samplers behind one interface: `step_sampler.py`; `make.py`
chooses.

On NVIDIA cards from Ampere on CUDA kernels sample, as `native_step_sampler.py`, with `native_rows.py` (the rows'
parameters), `native_buffers.py`, `native_kernels.py` (their text is in `native/sampling/`) and `native_graphs.py`.
Weights are integers of 64 bits there, so that sums are the same in any order, and truncations find their bounds by
histograms. `results.py` and `logprobs.py` read what they found, once it is on the host.

On other devices, and where a card refuses the kernels, the CPU's sampler does, as `host_step_sampler.py`. Results of
both agree with `tests/backends/reference_sampler`.
"""
