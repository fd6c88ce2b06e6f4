"""Ownership of KV cache blocks, in integers only; the memory belongs to the backend."""
