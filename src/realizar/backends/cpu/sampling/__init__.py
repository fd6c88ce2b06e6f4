"""Sampling of the rows of a step, all at once, by the kernel in `backends/cpu/kernels/sampling`.

`rows.py` keeps the parameters and the state of open rows where the kernel reads them. `runs.py` has the arrays of a
step, `step_sampler.py` describes there what its rows want of their logits, and takes out what was found. `kernel.py`
calls the kernel on all threads.
"""
