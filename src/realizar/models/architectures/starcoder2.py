"""StarCoder2: LayerNorm, a feed-forward without gate, biases everywhere, a window. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams, eps_keys=("attention.layer_norm_epsilon", "norm_epsilon"))
    builder = SpecBuilder(hparams, sizes, norm_kind="layer", norm_bias=True)
    rope = read_rope(hparams, sizes)
    windows = builder.windows(lambda _: True)
    bias = builder.bias("use_bias", "self_attn.q_proj", default=not hparams.is_gguf)
    activation = builder.activation(default="gelu_tanh")
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, window=windows[index], qkv_bias=bias, output_bias=bias),
            feed_forward=builder.ungated_feed_forward(index, activation, up="c_fc", down="c_proj", bias=bias),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=True)
