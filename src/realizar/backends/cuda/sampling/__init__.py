"""Sampling of all rows of a step at once, on the device. torch."""
