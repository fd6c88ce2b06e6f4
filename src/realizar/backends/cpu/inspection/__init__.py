"""Steps on the CPU taken apart, for `realizar profile` and `realizar trace`: see `InspectedCPUBackend` in
`backend.py`.
"""
