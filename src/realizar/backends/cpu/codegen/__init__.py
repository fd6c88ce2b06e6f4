"""Inner loops as LLVM code, emitted for the processor at hand: what Numba's own compiler would not find.

Read in this order:

1. `emit.py`: the emitter, a thin layer over llvmlite's builder with one vector width.
2. `formats.py`: the formats of packed matrices, and which one a layout takes; `../activation_layout.py` has the records
   of quantised activations.
3. `tile.py`: one weight tile times several tokens, with integer dot products by instruction set.
4. `vector_codebook_blocks.py`: blocks of layouts with a codebook of vectors, for the same.
5. `attention_tile.py` (scores, softmax, weighted sums), `vector_math.py` (exp, tanh, erf).
6. `recurrence.py`: the convolution of a gated delta net, and passes over its state.
7. `logit_blocks.py`: passes over a row of logits, for sampling.
"""
