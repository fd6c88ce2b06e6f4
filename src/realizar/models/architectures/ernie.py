"""ERNIE 4.5: Llama whose rotated pairs are neighbours in every form. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """ERNIE 4.5, dense."""
    sizes = read_dimensions(hparams, defaults={"head_dim": 128, "rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    default_base = 10000.0 if hparams.is_gguf else 500000.0
    rope = read_rope(hparams, sizes, pairing="interleaved", config_pairing="interleaved", default_base=default_base)
    if hparams.is_gguf and rope.size != sizes.head_size:
        raise hparams.unsupported("rope.dimension_count", None, rope.size)
    activation = builder.activation()
    qkv_bias = builder.bias("use_bias", "self_attn.q_proj")
    output_bias = builder.bias("use_bias", "self_attn.o_proj")
    mlp_bias = builder.bias("use_bias", "mlp.down_proj")
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=builder.feed_forward(index, activation, bias=mlp_bias),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=True)
