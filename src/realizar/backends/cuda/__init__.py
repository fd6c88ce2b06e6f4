"""The GPU backend: torch for memory and streams, Triton and CUDA C++ for kernels. Importing it imports neither.

A model is loaded once and stepped many times. Read in this order:

1. `runner.py`: `CUDABackend` submits steps to a model, which `load.py` puts on the device as one `LoadedModel`.
2. `step_arrays.py`: a step's integers at fixed addresses, and `StepSizes` of the largest step. `launch.py`: `StepKind`,
   by which kernels, epilogues and graphs are chosen. `shapes.py` pads steps to few kinds.
3. `bind.py`, `bind_dense.py`, `bind_mixture.py`, `norms.py`: the program's blocks become a list of launches over the
   buffers of `workspace.py`, with the tiles of `kernel_sizes.py`. `inputs/` has what comes before the blocks, and
   `ranks/` the sums of a model that several devices share.
4. `matmul/`, `attention/`: the two kinds of operations that take nearly all of a step's time.
   `recurrences/`: layers with a state, and its memory.
5. `graphs.py`, `capture.py`: the list of launches is run, or replayed from CUDA graphs captured at load, and by a
   server also after it.
6. `step.py`, `finish.py`, `sampling/`: a submitted step, its tokens, and its drafts. `inputs/draft_chain.py`: from one
   draft to the next.
7. `weights/`, `layouts/`: how weights are packed at load, and how they and activations lie in memory.
8. `sleep/`: the memory of a model that may sleep, at addresses that stay while its contents wait on the host.
9. `kernels/` (Triton), `native/` (CUDA C++): the kernels. `tuning/`: measured tiles, for `realizar tune`.

Besides: `tower.py`, `tower_plan.py` and `pictures/` (an encoder of images), `cache_copies.py` (blocks of the cache to
the host and back), `device.py`, `cards.py`, `presence.py` and `device_errors.py` (GPUs and their errors), `plan.py`
(memory from a header), `supported.py` and `inspection/` (profiles and traces).
"""
