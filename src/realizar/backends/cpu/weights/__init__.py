"""Weights as the CPU kernels read them: packed into tiles at load.

Read in this order: `load.py` (all weights of a model, allocated and then filled, and rows of the embedding, which stays
in its file), `pack.py` (sources to the tiles of `codegen/formats.py`, by several threads: raw blocks compiled, with
`repack_readers.py`; any layout by numpy; float matrices).
"""
