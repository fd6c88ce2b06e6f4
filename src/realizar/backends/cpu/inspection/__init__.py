"""Steps on the CPU taken apart, for `realizar profile` and `realizar trace`.

`backend.py` has `InspectedCPUBackend`, a backend whose steps can be taken apart. `operation_times.py` measures each
of a step's operations alone, and `step_values.py` reads the residual stream between them.
"""
