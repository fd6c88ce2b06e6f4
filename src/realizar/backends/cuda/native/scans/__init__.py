"""Gated delta nets on Hopper: chunks in tiles of 64 tokens, and many rows of one token each.

Of chunks read `tiles.cu` (what the kernels hand on), `inputs.cu`, `prepare.cu` and `states.cu`, of rows `rows.cu`;
`source.py` puts their texts together for a model's shape.
"""
