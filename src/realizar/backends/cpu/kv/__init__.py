"""The KV cache's memory on the CPU, and how a block lies in it."""
