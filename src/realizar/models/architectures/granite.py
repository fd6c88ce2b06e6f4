"""Granite: Llama with multipliers on embedding, residual, attention and logits. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import Settings
from realizar.models.rope_settings import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import Decoder


def build(settings: Settings) -> ModelSpec:
    """Granite, dense. `logits_scaling` divides."""
    sizes = read_dimensions(settings, defaults={"rms_norm_eps": 1e-6})
    decoder = Decoder(settings, sizes)
    # A GGUF file says with this key that there are no positions at all.
    has_rope = settings.boolean("rope.scaling.finetuned", None, default=True)
    rope = read_rope(settings, sizes, pairing="interleaved")
    scale = settings.optional_number("attention.scale", "attention_multiplier")
    if scale is None and not settings.is_gguf:
        scale = 1.0
    residual_scale = settings.optional_number("residual_scale", "residual_multiplier") or 1.0
    embedding_scale = settings.optional_number("embedding_scale", "embedding_multiplier") or 1.0
    logit_divisor = settings.number("logit_scale", "logits_scaling", default=1.0)
    activation = decoder.activation()
    qkv_bias = decoder.bias("attention_bias", "self_attn.q_proj")
    output_bias = decoder.bias("attention_bias", "self_attn.o_proj")
    mlp_bias = decoder.bias("mlp_bias", "mlp.down_proj")
    layers = [
        Layer(
            attention=decoder.attention(
                index, rope=rope if has_rope else None, scale=scale, qkv_bias=qkv_bias, output_bias=output_bias
            ),
            feed_forward=decoder.feed_forward(index, activation, bias=mlp_bias),
            input_norm=decoder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=decoder.norm(f"model.layers.{index}.post_attention_layernorm"),
            residual_scale=residual_scale,
        )
        for index in range(sizes.num_layers)
    ]
    return decoder.spec(layers, tied_by_default=False, embedding_scale=embedding_scale, logit_scale=1.0 / logit_divisor)
