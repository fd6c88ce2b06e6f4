"""Inner loops as LLVM code, emitted for the processor at hand: what Numba's own compiler would not find.

Read in this order:

1. `emit.py`: the emitter, a thin layer over llvmlite's builder with one vector width.
2. `activation_layout.py`: the records of quantised activations. `dot.py`: integer dot products by instruction set.
3. `tile.py`, with `tile_addresses.py` and `activation_reads.py`: one weight tile times several tokens.
4. `vector_codebook_blocks.py`: blocks of layouts with a codebook of vectors, for the same.
5. `attention_tile.py` (scores, softmax, weighted sums), `vector_math.py` (exp, tanh, erf).
6. `recurrence.py`: the convolution of a gated delta net, and passes over its state.
7. `logit_blocks.py`: passes over a row of logits, for sampling.
"""
