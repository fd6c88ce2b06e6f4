"""The KV cache on the CPU: `memory.py` sizes and allocates it, `layout.py` says how a block lies in it."""
