"""Backends run models: one protocol, and one folder for each kind of device.

Read `base.py` first: `Backend` is the whole seam between the engine and a device. Then `program.py`, which turns a
`ModelSpec` into blocks, the form in which both backends (`cpu/`, `cuda/`) bind a model to their kernels. `select.py`
chooses the backend, and `device_choice.py` the device (`devices.py`); `resolved_config.py` fills in what a
configuration leaves open; `supported.py` has each backend refuse the kinds of layers that it does not run, and drafters
that do not suit a model. `verdict/` finds out whether a GPU computes what the CPU does. `ranks/` has several processes
compute one model, each a part of every sum, which they add up through `rank_memory.py`; `spans/` has several devices
compute some of the layers each.

Both share the other modules: `memory_plan.py`, `kv_blocks.py`, `machine.py` and `cgroup.py` for memory; `parts.py`,
`inspection.py`, `step_values.py` and `bandwidth.py` for profiles and traces; `weight_tensors.py`, `load_progress.py`
and `loaded_capacity.py` for loading; `draft_model.py`, `row_axes.py`, `row_faults.py`, `row_masks.py` and
`host_sampler.py` for steps.
"""
