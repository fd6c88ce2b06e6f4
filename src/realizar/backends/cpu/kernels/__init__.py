"""CPU kernels. Each is a C function `kernel(arguments, thread, threads)` bound to addresses at load."""
