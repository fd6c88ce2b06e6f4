"""The CPU backend: Numba kernels over LLVM intrinsics. The only home of numba and llvmlite.

A model is bound once to a table of kernels and addresses, which a team of threads then walks for each step without the
interpreter's lock. Read in this order:

1. `runner.py`: `CPUBackend` runs steps of a model, which `load.py` makes as one `LoadedModel`.
2. `bind.py`, with `bind_kv.py` for attention, `bind_experts.py` for mixtures, `bind_state.py` for mixers with a state
   and `bind_ranks.py` for sums of ranks: blocks become a table (`operations.py`) of kernels and argument records
   (`records.py`), over the buffers of `workspace.py`.
3. `walker.py`, `threads.py`: the walk of that table by all threads, with barriers, and the exceptions of kernels.
4. `kernels/`: the C functions of that table; `codegen/`: their inner loops as LLVM code; `activation_layout.py`: the
   quantised activations that they read. `kernel.py` makes kernels of functions, `kernel_library.py` has those of a
   kind, `kernel_cache.py` keeps them on disk, `compile_ahead.py` compiles them in processes, `memory.py` reads and
   writes memory by address there, and `emitted.py` makes intrinsics of functions that emit code.
5. `weights/`: matrices packed into tiles. `kv/`: the KV cache. `state/`: states of rows. `sampling/`: sampling of
   tokens, by the kernel in `kernels/sampling/`.
6. `tower.py` runs encoders of images by the same kernels.

Besides: `instruction_set.py`, `plan.py`, `supported.py` and `inspection/` (profiles and traces).
"""

from realizar.backends.cpu.kernel_cache import target

target()  # before Numba compiles anything
