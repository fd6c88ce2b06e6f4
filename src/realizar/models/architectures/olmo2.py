"""OLMo 2: norms only after attention and feed-forward, and over all heads of Q and K. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """OLMo 2."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes, norm_after_attention=True)
    rope = read_rope(hparams, sizes)
    activation = builder.activation()
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm="token"),
            feed_forward=builder.feed_forward(index, activation),
            post_mixer_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
            post_feedforward_norm=builder.norm(f"model.layers.{index}.post_feedforward_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False)
