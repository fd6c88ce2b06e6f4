"""Measured tiles and splits of matmuls: the work of `realizar tune`.

Read in this order: `sweep.py` (the matmuls of a model, tiles and splits worth measuring, and the loop over them),
`experts.py` (the same of matmuls over experts), `measure.py` (timing them on this machine's GPU, and writing the
table). `matmul/tuning_table.py` reads the tables when a model is loaded.
"""
