"""Steps on the CPU taken apart, for `realizar profile` and `realizar trace`.

`backend.py` has `InspectedCPUBackend`, a backend whose steps can be taken apart: each of
a step's operations is measured alone, and the residual stream read between them.
"""
