"""Weights as the CPU kernels read them: packed into tiles at load.

`load.py` has all weights of a model, and rows of the embedding, which stays in its file. `pack.py` brings sources to
the tiles of `codegen/formats.py`: raw blocks by compiled code (`repack_readers.py`), any layout by numpy; float
matrices.
"""
