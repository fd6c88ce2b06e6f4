"""Layouts of weights and activations in device memory. numpy only: these modules are the reference for the kernels.

Read `fragments.py` first: weights in the register order of the tensor cores. `activations.py` has the two formats of a
quantised matmul's input. The packers in `weights/` and the kernels must give exactly these bytes.
"""
