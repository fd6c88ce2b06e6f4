"""The CPU backend: Numba kernels over LLVM intrinsics. The only home of numba and llvmlite."""

from realizar.backends.cpu.kernel_cache import use_cache_folder

use_cache_folder()

from realizar.backends.cpu.runner import CPUBackend  # noqa: E402  (kernels compile into the folder named above)

__all__ = ["CPUBackend"]
