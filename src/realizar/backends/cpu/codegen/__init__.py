"""Inner loops as LLVM code, emitted for the processor at hand: what Numba's own compiler would not find.

Begin with `emit.py`, a thin layer over llvmlite's builder with one vector width, and `formats.py`, the formats of
packed matrices. `tile.py` multiplies one weight tile with several tokens, `vector_codebook_blocks.py` reads blocks for
it, and `float_tile.py` multiplies one of floats. `attention_tile.py`, `recurrence.py` and `logit_blocks.py` serve
attention, delta nets and sampling; `vector_math.py` has exp, tanh and erf.
"""
