"""Layouts of weights and activations in device memory. numpy only: these modules are the reference for the kernels.

`fragments.py` has the weights, in the register order of the tensor cores; read it first, with the picture in its
docstring beside it. `activations.py` has the two formats of a
quantised matmul's input: `int8` for few tokens, `half` for more, and for floats. The packers in `weights/` and the
kernels in `kernels/` and `native/` must give exactly these bytes.
"""
