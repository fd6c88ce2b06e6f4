"""Weights as the CPU kernels read them: packed into tiles at load."""
