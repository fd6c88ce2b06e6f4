"""Triton kernels: everything but the quantised matmuls. Each runs under Triton's interpreter too."""
