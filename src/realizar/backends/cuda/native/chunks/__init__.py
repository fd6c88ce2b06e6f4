"""Attention of chunks in CUDA C++, by wgmma on Hopper and by mma.sync on cards without it.

Read `tiles.cu` first, which says how it goes on Hopper. `rows.cu` has what both kernels do, `copies.cu` the warps that
copy, `attend.cu` those that attend, and `warpgroups.cu` what scans of delta nets have, too.
`sync_copies.cu` says how it goes by mma.sync, and `sync_attend.cu` has the rest of that kernel.
`source.py` puts their text together for a model's shape, `tensor_map.py` says how the copy engine finds boxes of rows.
"""
