"""Layers with a state on the GPU: its memory, the rows of a step as their kernels take them, and their launches."""
