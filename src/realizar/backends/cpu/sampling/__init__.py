"""Sampling of the rows of a step, all at once, by the kernel in `backends/cpu/kernels/sampling`.

`rows.py` keeps the parameters and the state of open rows where the kernel reads them. `step_sampler.py` describes what
a step's rows want of their logits, and makes records of what was found. `kernel.py` calls the kernel on all threads.
"""
