"""Measured tiles and splits of matmuls: the work of `realizar tune`.

Read in this order: `sweep.py` (the matmuls of a model, and the loop over candidates), `candidates.py` (tiles and splits
worth measuring), `measure.py` (timing them on this machine's GPU, and writing the table). Matmuls over experts have
`experts.py` (both of the first two) and `measure_experts.py`; `replay.py` has the clock. `matmul/tuning_table.py` reads
the tables when a model is loaded.
"""
