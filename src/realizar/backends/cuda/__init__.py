"""The GPU backend: torch for memory and streams, Triton and CUDA C++ for kernels."""

from realizar.backends.cuda.runner import CUDABackend

__all__ = ["CUDABackend"]
