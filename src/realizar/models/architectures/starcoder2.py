"""StarCoder2: LayerNorm, a feed-forward without gate, biases everywhere, a window. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams, eps_keys=("attention.layer_norm_epsilon", "norm_epsilon"))
    builder = SpecBuilder(hparams, sizes, norm_kind="layer", norm_bias=True, default_activation="gelu_tanh")
    rope = read_rope(hparams, sizes)
    windows = builder.windows(lambda _: True)
    bias = builder.bias("use_bias", "self_attn.q_proj", default=not hparams.is_gguf)
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, window=windows[index], biases=(bias, bias)),
        lambda index: builder.feed_forward(index, ("c_fc", "c_proj"), bias=bias),
    )
    return builder.spec(layers, tied_by_default=True)
