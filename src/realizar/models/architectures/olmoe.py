"""OLMoE: experts in every layer, and norms over all heads of Q and K. Standard library only."""

from __future__ import annotations

from realizar.models.dimensions import read_dimensions
from realizar.models.experts import build_experts, read_expert_count, read_experts_per_token
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder


def build(hparams: HyperParameters) -> ModelSpec:
    """The feed-forward length of its files is that of one expert."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    rope = read_rope(hparams, sizes)
    count = read_expert_count(hparams)
    per_token = read_experts_per_token(hparams, count)
    # A GGUF file can't say that weights are divided by their sum: llama.cpp does not.
    normalized = hparams.boolean(None, "norm_topk_prob", default=False)
    activation, width = builder.activation(), sizes.feed_forward_size
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    output_bias = builder.bias("attention_bias", "self_attn.o_proj")
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm="token"),
            feed_forward=build_experts(
                builder, index, activation, count=count, per_token=per_token, width=width, normalized=normalized
            ),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False)
