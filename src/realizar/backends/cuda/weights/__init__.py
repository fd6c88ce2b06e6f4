"""Weights on the device: loaded, packed and stored, an allocation for each layer."""
