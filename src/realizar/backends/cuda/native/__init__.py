"""CUDA C++: the matmuls with quantised weights, compiled by NVRTC at first use and kept on disk."""
