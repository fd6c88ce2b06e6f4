"""Weights on the device: loaded, packed and stored, an allocation for each layer.

Read in this order:

1. `load.py`: `Weights` takes every tensor of a checkpoint and decides which packer it goes to.
2. `pack.py`: `PackedMatrix`, weights in fragment order (`layouts/fragments.py`), packed by numpy from any layout.
3. `pack_raw.py`: the same bytes made on the device from a file's raw blocks, for the layouts that `repack.cu` reads,
   or by torch, from bf16 and fp16.
4. `experts.py`: the matrices of all experts of a layer in one allocation; `ExpertsPlan` says what lies in which.
5. `plain.py`: `PlainMatrix`, row by row, for GPUs that run Triton's kernels alone.
6. `store.py`: one allocation for the tensors of a layer.
"""
