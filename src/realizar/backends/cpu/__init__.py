"""The CPU backend: Numba kernels over LLVM intrinsics. The only home of numba and llvmlite."""

from realizar.backends.cpu.kernel_cache import use_cache_folder

use_cache_folder()  # before any kernel's module is imported, as kernels compile into the folder
