"""Sums of a model that several GPUs share, one a process.

`sums.py`: what a step asks of them, `RankSums`. `peers.py`: by kernels that write other GPUs' memory. `group.py`: the
processes, which share that memory, or add up through NCCL.
"""
