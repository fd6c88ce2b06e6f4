"""Architectures as descriptions: one file each turns metadata into a `ModelSpec`. Neither numba nor torch."""
