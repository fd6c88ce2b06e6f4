"""Steps on a GPU taken apart, for `realizar profile` and `realizar trace`: `InspectedCUDABackend` in `backend.py`.

`launch_times.py` measures each of a step's launches alone.
"""
