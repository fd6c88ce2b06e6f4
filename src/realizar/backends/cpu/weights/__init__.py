"""Weights as the CPU kernels read them: packed into tiles at load.

Read in this order: `formats.py` (the packed formats, and which one a layout takes), `load.py` (all weights of a model),
`pack.py` (sources to tiles, by several threads). The packers behind it: `repack.py` with `repack_readers.py` and
`repack_fields.py` (raw blocks, compiled), `pack_planes.py` (any layout, by numpy), `pack_floats.py` (float matrices).
`embedding_rows.py` reads rows of the embedding, which stays in its file.
"""
