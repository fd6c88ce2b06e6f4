"""CUDA C++: matmuls with quantised weights, attention and sampling, compiled by NVRTC at first use.

A kernel's text is put together from .cu files behind a list of macros. Read in this order:

1. `sources.py`: the text of a matmul kernel: tiles, weight format, epilogue. `attend_source.py`: that of attention.
2. `primitives.cu`: what all matmuls share. `weights.cu`: reading and decoding weights, for every format.
3. `matvec.cu` (few tokens, integer dot products), `mma_sync.cu` (tensor cores from Ampere on), `wgmma.cu` (Hopper);
   `mma_sync_instructions.cu` and `wgmma_instructions.cu`.
4. Their epilogues: `matvec_gated.cu`, `wgmma_gated.cu` with `gated_epilogue.cu`; `matvec_residual.cu` with `codes.cu`.
5. `attend.cu`, with `attend_heads.cu` and `attend_results.cu`. `bulk.cu`: copies by Hopper's copy engine.
6. `activations.cu` and `repack.cu`: activations and raw weight blocks to the kernels' formats; `raw_layouts.py`.
7. `chunks/` (attention), `scans/` (delta nets), `experts/`, `grouped/` (pairs sorted by expert) and `sampling/`, each
   with a `source.py`. `long_steps/`: Hopper's matmuls of many tokens; `fp8/`: those in 8-bit floats.

`compiler.py` and `nvrtc.py` compile and keep cubins on disk; `launcher.py` loads and starts them.
"""
