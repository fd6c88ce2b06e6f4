"""What an encoder of images lacks to run between the steps of a text model.

`slices.py`: what its parts take of the device, and `Slicer`, which launches those that fit into a slice's time.
`grids.py`: what it has on the device for all pictures of one size. `pinned.py`: memory of the host for features.
"""
