"""CPU kernels. Each is a C function `kernel(arguments, thread, threads)` bound to addresses at load.

A step meets them in this order: `select.py` (rows whose logits are wanted), `normalize.py` and `quantize.py` (norms,
residual adds, activations to records), `linear.py` and `float_linear.py` (matmuls), `rotate.py` (QK norm, rope, keys
and values into the cache), `attention.py` with `attention_record.py` and `attention_segment.py`,
`delta_net.py` and `short_convolution.py` (a recurrence and a convolution in place of attention), and `activate.py` (the
feed-forward's activation), or for a mixture of experts `routing.py` (choice of experts, tokens sorted by them, their
sum) and `expert_linear.py` (their matmuls and activation). `layer_inputs.py` makes the inputs of layers that have their
own. `sampling/` has the choice of tokens.
Inner loops come from `codegen/`.
"""
