"""Attention over the paged KV cache: from the QKV matmul to the input of the output projection.

Read in this order:

1. `bind.py`: the launches of one layer: norm and rope, attention of chunks, conversion of the result; with
   `batch_invariant` attention of single tokens by parts at fixed places.
2. `decode.py`: attention of single tokens; it picks the CUDA C++ kernel, or Triton's where that one has no such shape.
   It compiles and launches `native/attend.cu`.
3. `arguments.py`: arguments that these kernels share. `output_gate.py`: the gate of heads, also of recurrent layers.
4. `kv_memory.py`, `rope_tables.py`: the cache's blocks, and cosines and sines of all positions.
"""
