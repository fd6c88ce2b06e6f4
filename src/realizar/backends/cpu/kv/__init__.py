"""The KV cache on the CPU: `memory.py` sizes and allocates it, `layout.py` says how a block lies in it.

`pictures.py` has the keys and values of a picture that a tower encodes.
"""
