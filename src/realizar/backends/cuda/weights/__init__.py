"""Weights on the device: loaded, packed and stored, an allocation for each layer.

`load.py` takes every tensor of a checkpoint to its packer: `pack_raw.py` (fragment order, made on the device, or by
threads from any layout; `pack.py` has what comes of it), `experts.py` (all experts of a layer in one allocation) or
`plain.py` (row by row, for GPUs that run Triton's kernels alone). `store.py` has the allocation of a layer.
"""
