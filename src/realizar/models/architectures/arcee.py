"""Arcee (AFM): Llama with a feed-forward of ReLU squared, without gate. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """Converters to GGUF reorder the rows of Q and K as Llama's."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    rope = read_rope(hparams, sizes, pairing="interleaved")
    if hparams.is_gguf and rope.size != sizes.head_size:
        raise hparams.unsupported("rope.dimension_count", None, rope.size)
    scale = hparams.optional_number("attention.scale", None)
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    mlp_bias = builder.bias("mlp_bias", "mlp.down_proj")
    activation = builder.activation(default="relu_squared")
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, scale=scale, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=builder.ungated_feed_forward(index, activation, bias=mlp_bias),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False)
