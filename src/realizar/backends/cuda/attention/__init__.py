"""Attention over the paged KV cache: from the QKV matmul to the input of the output projection.

Read `bind.py` first, the launches of one layer. `decode.py` has those of single tokens and `chunks.py` those of chunks,
by `native/attend.cu` and `native/chunks/attend.cu` or else Triton. `arguments.py` and `output_gate.py` serve both, the
gate recurrent layers too. `kv_memory.py` and `rope_tables.py` have the cache's blocks, and cosines and sines of all
positions.
"""
