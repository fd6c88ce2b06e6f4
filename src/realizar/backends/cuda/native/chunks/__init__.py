"""Attention of chunks on Hopper.

`attend.cu` is the kernel, `source.py` puts its text together for a model's shape, and `tensor_map.py` says how the copy
engine finds boxes of rows.
"""
