"""Quantised weights: every ggml type to `Planes` and to float32. numpy only.

Read in this order:

1. `layout.py`, `source.py`: `WeightLayout` and `MatrixSource`, on which backends depend.
2. `planes.py`: `Planes`, the numbers of any layout in one form.
3. `block_source.py`: the sources of ggml blocks and plain numbers.
4. `tensors.py`: a checkpoint's tensors as sources; `matrix_format.py`, `mxfp4_tensors.py`, and with `parts.py`
   `integer_tensors.py` and `float_tensors.py`: those stored as several.
5. `ggml_layouts.py`, `convert.py`: the layout of each ggml type, and the function that reads its blocks; with
   `iq_grids.py`, `microscaling.py` and `fields.py` for one family or all.
6. `finite.py`, `random_blocks.py`: the search for NaN, and random blocks for generated models.
"""
