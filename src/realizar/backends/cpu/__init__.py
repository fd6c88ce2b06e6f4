"""The CPU backend: Numba kernels over LLVM intrinsics. The only home of numba and llvmlite.

A model is bound once to a table of kernels and addresses, which a team of threads then walks for each step without the
interpreter's lock. Read in this order:

1. `runner.py`: `CPUBackend` runs steps of a model, which `load.py` makes as one `LoadedModel`.
2. `bind.py`: the program's blocks become a table (`operations.py`) of kernels and argument records (`records.py`),
   over the buffers of `workspace.py`, where the kernels of a mixture of experts meet too. `bind_kv.py` does so for
   attention, with the tables of rope, `bind_state.py` for mixers with a state.
3. `walker.py`, `threads.py`: the walk of that table by all threads, with barriers, and the exceptions that
   kernels raise there.
4. `kernels/`: the C functions of that table; `codegen/`: their inner loops as LLVM code; `activation_layout.py`: the
   records of quantised activations that they read. `kernel_library.py` makes
   the kernels and `kernel_cache.py` keeps them on disk. `memory.py` reads and writes memory by address there.
5. `weights/`: matrices packed into tiles. `kv/`: the KV cache. `state/`: states of rows. `sampling/`: the choice of
   tokens, by the kernel in `kernels/sampling/`.

Besides: `instruction_set.py` (what the processor offers), `plan.py` (memory from a header), `supported.py` (the kinds
of layers that run), `compile_events.py` (reports of compilation) and `inspection/` (profiles and traces).
"""

from realizar.backends.cpu.kernel_cache import use_cache_folder

use_cache_folder()  # before any kernel's module is imported, as kernels compile into the folder
