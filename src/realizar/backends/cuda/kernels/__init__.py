"""Triton kernels: everything but the quantised matrix products. Each runs under Triton's interpreter too."""
