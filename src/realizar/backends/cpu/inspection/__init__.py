"""Steps on the CPU taken apart, for `realizar profile` and `realizar trace`: `InspectedCPUBackend` of `backend.py`."""
