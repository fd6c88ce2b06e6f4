"""Backends run models: one protocol, and one folder for each kind of device.

Read `base.py` first: `Backend` is the whole seam between the engine and a device. Then `program.py`, which turns a
`ModelSpec` into blocks, the form in which both backends bind a model to their kernels. `select.py` chooses the backend
and the device (`devices.py`); `resolved_config.py` fills in what a configuration leaves open. `cpu/` and `cuda/` are
the two backends, and `supported.py` has each refuse the kinds of layers that it does not run. `verdict/` finds out
whether a GPU computes what the CPU does.

Both share the other modules. `memory_plan.py` and `kv_blocks.py` compute memory from a file's header, within the
limits that `machine.py` and `cgroup.py` find. `parts.py`, `inspection.py`, `step_values.py` and `bandwidth.py` serve
profiles and traces. `weight_tensors.py` finds a model's weights in its checkpoint, `load_progress.py` reports how far
their load is, `loaded_capacity.py` says how much a loaded model has room for, `draft_model.py` has a model draft for
another, `row_faults.py` words the errors of a row, `row_masks.py` holds the masks of a step, `philox.py` draws random
numbers, and `host_sampler.py` lets a GPU's backend use the CPU's sampler.
"""
