"""Triton kernels of layers with a state.

`short_convolution.py`, and of gated delta nets `delta_inputs.py`, then `delta_decode.py` (steps of one token a row),
`delta_net.py` (token by token) or `delta_scan.py` (chunks).
"""
