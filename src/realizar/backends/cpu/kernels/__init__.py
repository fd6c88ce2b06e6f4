"""CPU kernels. Each is a C function `kernel(arguments, thread, threads)` bound to addresses at load.

A step meets them in this order: `layer_inputs.py`, `normalize.py` and `quantize.py` (activations to records),
`linear.py` and `float_linear.py` (matmuls), `rotate.py` (QK norm, rope, keys and values into the cache), `attention.py`
with `attention_record.py` and `attention_segment.py`, or `delta_net.py` and `short_convolution.py`; `activate.py`, or
for experts `routing.py` and `expert_linear.py`; `normalize.py` again (rows whose logits are wanted) and `sampling/`.
Inner loops come from `codegen/`. `ranks.py` adds up the sums of ranks behind the matmuls that have parts of them.
"""
