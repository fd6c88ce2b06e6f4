"""Attention over the paged KV cache, bound to kernels, with the cache's memory and the rope tables."""
