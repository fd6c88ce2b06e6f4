"""Matmuls with packed weights: which kernel runs, with which tiles, and what it does with its sums.

Read in this order:

1. `linears.py`: `MergedLinear`, matrices that share an input, multiplied as one; `Merger` makes them from blocks.
2. `quantized.py`: `MatmulKernels` picks, compiles and launches the CUDA C++ kernels. Its docstring is the contract.
3. `inputs.py`: the activation buffers that matmuls read, one for each format and width.
4. `tuning_table.py`: tiles and splits for a number of tokens and a shape, from measured tables or by rule;
   `fixed_order.py`: those whose sums have one order for any number of tokens, for `batch_invariant`.
5. `residual.py`: the epilogue that adds to the residual stream.
6. `routing.py`: the choice of experts for up to 256 tokens. `experts.py`: matmuls of a mixture, whose experts are
chosen
   on the device; `grouped.py` with `grouped_tiles.py`: the same by the tensor cores, pairs sorted by expert.
7. `fp8.py`: long steps in 8-bit floats.
"""
