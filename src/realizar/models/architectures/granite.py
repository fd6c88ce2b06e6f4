"""Granite: Llama with multipliers on embedding, residual, attention and logits. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """Granite, dense. `logits_scaling` divides."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-6})
    builder = SpecBuilder(hparams, sizes)
    # A GGUF file says with this key that there are no positions at all.
    has_rope = hparams.boolean("rope.scaling.finetuned", None, default=True)
    rope = read_rope(hparams, sizes, pairing="interleaved")
    scale = hparams.optional_number("attention.scale", "attention_multiplier")
    if scale is None and not hparams.is_gguf:
        scale = 1.0
    residual_scale = hparams.optional_number("residual_scale", "residual_multiplier") or 1.0
    embedding_scale = hparams.optional_number("embedding_scale", "embedding_multiplier") or 1.0
    logit_divisor = hparams.number("logit_scale", "logits_scaling", default=1.0)
    activation = builder.activation()
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    mlp_bias = builder.bias("mlp_bias", "mlp.down_proj")
    layers = [
        Layer(
            mixer=builder.attention(
                index, rope=rope if has_rope else None, scale=scale, qkv_bias=qkv_bias, output_bias=output_bias
            ),
            feed_forward=builder.feed_forward(index, activation, bias=mlp_bias),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
            residual_scale=residual_scale,
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False, embedding_scale=embedding_scale, logit_scale=1.0 / logit_divisor)
