"""Sampling of the rows of a step, all at once, by the kernel in `backends/cpu/kernels/sampling`.

`rows.py` keeps parameters and state of open rows, `runs.py` has the arrays of a step, `step_sampler.py` fills them and
takes out what was found, and `kernel.py` calls the kernel on all threads.
"""
