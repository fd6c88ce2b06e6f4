"""Architectures as descriptions: one file each turns metadata into a `ModelSpec`. Neither numba nor torch.

Read in this order:

1. `spec.py`: `ModelSpec`, all that a backend knows of a model. `parts.py`: matrices, norms and rotations.
   `mixers.py`: mixers other than attention over a layer's own keys. `layer_inputs.py`: inputs beside the residual
   stream. `expert_norms.py`: norms of a mixture's parts. `tensor_source.py`: where tensors lie.
2. `registry.py`: `build_spec` looks the architecture's file up in `architectures/`; `llama.py` there is the plainest.
3. `hyper_parameters.py`, `dimensions.py`, `rope_parameters.py`: strict reading of metadata, with
   the keys that have no effect; `rope.py` computes the frequencies.
4. `spec_builder.py`, `experts.py`: the parts of a decoder, with their tensors. `tensor_names.py` maps the names,
   `multimodal.py` finds the text model inside a larger one, and `next_token.py` the blocks that draft; `drafters/`
   has drafters in files of their own.
5. `tower.py`: `Tower`, all that a backend knows of an encoder of images; `towers/` has a file for each kind.
6. `check_tensors.py`: the tensors of a spec are exactly those of its checkpoint. `shard.py` cuts a spec for ranks,
   and `cut_layers.py` into spans of layers.
7. `parameters.py` counts parameters, `pooling.py` is the pooling of an embedding model, and `ranking.py`
   the head of a reranker. `generated/` has models of random weights.
"""
