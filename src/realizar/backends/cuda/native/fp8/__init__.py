"""Matmuls of long prompts in 8-bit floats (e4m3) on Hopper.

`decode.cu` writes a matrix's weights as e4m3, which `wgmma.cu` multiplies by activations; `wgmma_instructions.cu` has
its matrix instruction and the order of its tiles, `wgmma_gated.cu` its end for gate and up. `native.sources` puts them
together.
"""
