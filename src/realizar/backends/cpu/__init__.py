"""The CPU backend: Numba kernels over LLVM intrinsics. The only home of numba and llvmlite."""
