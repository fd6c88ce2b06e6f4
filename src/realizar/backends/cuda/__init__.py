"""The GPU backend: torch for memory and streams, Triton and CUDA C++ for kernels. Importing it imports neither."""
