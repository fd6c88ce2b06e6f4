"""Readers of checkpoint files. A `Checkpoint` has metadata, and tensors as views of the mapped file. numpy."""
