"""Weights as the CPU kernels read them: packed into tiles at load.

Read in this order: `formats.py` (the packed formats, and which one a layout takes), `load.py` (all weights of a model,
and rows of the embedding, which stays in its file), `pack.py` (sources to tiles, by several threads: raw blocks
compiled, with `repack_readers.py` and `repack_fields.py`; any layout by numpy), `pack_floats.py` (float matrices).
"""
