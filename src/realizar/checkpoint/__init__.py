"""Checkpoint files read into `Checkpoint`: metadata, and tensors as views of the mapped file. numpy."""
