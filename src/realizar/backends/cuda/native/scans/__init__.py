"""Chunks of gated delta nets on Hopper, in tiles of 64 tokens.

Read `tiles.cu` (what the kernels hand on), `inputs.cu`, `prepare.cu` and `states.cu`; `source.py` puts their texts
together for a model's shape.
"""
