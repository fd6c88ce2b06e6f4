"""Measured tiles and splits of matmuls: the work of `realizar tune`.

`sweep.py` and `experts.py` have the matmuls of a model and their candidates, and the one loop over them; `measure.py`
times them on this machine's GPU, and writes the table that `matmul/tuning_table.py` reads when a model is loaded.
"""
