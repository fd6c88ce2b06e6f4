"""Matmuls of long prompts in 8-bit floats (e4m3) on Hopper.

`wgmma.cu` is the kernel, `wgmma_instructions.cu` its matrix instruction and the order of its blocks, `wgmma_gated.cu`
its end for gate and up. `native.sources` puts them together.
"""
