"""Weights on the device: loaded, packed and stored, an allocation for each layer.

`load.py` takes every tensor of a checkpoint to its packer: `pack.py` (fragment order, by numpy from any layout),
`pack_raw.py` (the same bytes made on the device), `experts.py` (all experts of a layer in one allocation) or `plain.py`
(row by row, for GPUs that run Triton's kernels alone). `store.py` has the allocation of a layer.
"""
