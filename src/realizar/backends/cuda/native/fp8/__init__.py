"""Matmuls of long prompts in 8-bit floats (e4m3) on Hopper, and of many rows where weights are stored so.

`decode.cu` writes weights as e4m3, but for those that are stored so, and `wgmma.cu` multiplies them by activations;
`wgmma_instructions.cu` has its matrix instruction, `wgmma_gated.cu` its end for gate and up. What its tiles are and
where their sums go says `dense.cu`, or `experts.cu` for the rows of experts. `native.sources` puts them together.
"""
