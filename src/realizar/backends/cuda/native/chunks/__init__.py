"""Attention of chunks on Hopper.

Read `tiles.cu` first, which says how it goes. `copies.cu` has the warps that copy, `attend.cu` those that attend, and
`warpgroups.cu` what scans of delta nets have, too.
`source.py` puts their text together for a model's shape, `tensor_map.py` says how the copy engine finds boxes of rows.
"""
