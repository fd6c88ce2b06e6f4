"""Steps on a GPU taken apart, for `realizar profile` and `realizar trace`. torch.

`backend.py` has `InspectedCUDABackend`, a backend whose steps can be taken apart. `launch_times.py` measures each of
a step's launches alone.
"""
