"""Hopper's matmuls of long steps: blocks that stay for many tiles.

`wgmma.cu` comes after the `wgmma.cu` of all steps, whose strips, products and outputs it takes; `native.sources` puts
them together.
"""
