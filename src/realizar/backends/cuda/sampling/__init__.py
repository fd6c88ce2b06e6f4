"""Sampling of all rows of a step at once.

There are two samplers, behind one interface: `step_sampler.py`.

By CUDA kernels, on NVIDIA cards from Ampere on, as `native_choices.py`: `native_rows.py` keeps the rows' parameters
where kernels read them, `native_buffers.py` the memory of a step's choices, `native_kernels.py` compiles and starts the
kernels, whose text is in `native/sampling/`, and `native_graphs.py` has them as graphs for steps of decodes. The device
reads grammars' masks where other processes write them. Weights are integers of 64 bits there, so
that sums are the same in any order, and truncations find their bounds by histograms, without a sort. `results.py` reads
what they found, once it is on the host, `logprobs.py` the log-probabilities among it; choices of rows with drafts
are cut at the ends of their outputs (`native_rows.py`).

By the CPU's sampler on the host, as `host_choices.py`, on other devices, and where a card refuses the kernels. Results
of both agree with `tests/backends/reference_sampler`.
"""
