"""Matmuls of long prompts in 8-bit floats (e4m3) on Hopper.

`decode.cu` writes weights as e4m3, which `wgmma.cu` multiplies by activations; `wgmma_instructions.cu` has its matrix
instruction, `wgmma_gated.cu` its end for gate and up. What its tiles are and where their sums go says `dense.cu`, or
`experts.cu` for the rows of experts. `native.sources` puts them together.
"""
