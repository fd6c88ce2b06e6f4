"""Hopper's matmuls of long steps: blocks that stay for many tiles, in clusters that share activations.

`wgmma.cu` comes after the `wgmma.cu` of all steps, whose strips, products and outputs it takes; `sharing.cu` is what
blocks of a cluster do for each other, in `native.fp8` too. `native.sources` puts them together.
"""
