"""A model's memory on the GPU, given back while it is idle: its contents wait in the host's memory.

Addresses stay, because graphs and kernels' arguments hold them: memory is mapped at reserved addresses, taken away from
them and put there again.
"""
