"""A model whose layers several devices compute, one after another.

1. `backend.py`: the `Backend` of all of them, which hands the residual stream from each device to the next.
2. `resolve.py`: which layers each has, and what a configuration leaves open for it.
"""
