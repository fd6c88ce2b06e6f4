"""States that layers keep of each row: `sizes.py`, their memory in `memory.py`, and what kernels read in `rows.py`."""
