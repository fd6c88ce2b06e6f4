"""Granite: Llama with multipliers on embedding, residual, attention and logits; dense or of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from realizar.models.dimensions import MAX_FEED_FORWARD, read_dimensions
from realizar.models.experts import (
    Joined,
    build_experts,
    build_shared,
    read_expert_count,
    read_experts_per_token,
)
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Activation
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import AnyFeedForward, Experts, FeedForward, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder

_NAMES = {"mlp.gate": "block_sparse_moe.router.layer", "mlp.shared_experts.down_proj": "shared_mlp.output_linear"}
_JOINED = Joined("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")


def build(hparams: HyperParameters) -> ModelSpec:
    def dense(builder: SpecBuilder, activation: Activation) -> Callable[[int], AnyFeedForward]:
        bias = builder.bias("mlp_bias", "mlp.down_proj")
        return lambda index: builder.feed_forward(index, activation, bias=bias)

    return _build(hparams, dense)


def build_mixture(hparams: HyperParameters) -> ModelSpec:
    """Granite with experts, and with a shared one or without. The feed-forward length is that of one expert."""
    count = read_expert_count(hparams)
    per_token = read_experts_per_token(hparams, count)
    shared = hparams.integer(
        "expert_shared_feed_forward_length", "shared_intermediate_size", low=0, high=MAX_FEED_FORWARD, default=0
    )

    def mixed(builder: SpecBuilder, activation: Activation) -> Callable[[int], AnyFeedForward]:
        width = builder.sizes.feed_forward_size

        def layer(index: int) -> Experts:
            experts = build_experts(
                builder, index, activation, count=count, per_token=per_token, width=width, normalized=True,
                joined=_JOINED,
            )  # fmt: skip
            return replace(experts, shared=_shared(builder, index, activation, shared)) if shared else experts

        return layer

    return _build(hparams, mixed)


def _shared(builder: SpecBuilder, index: int, activation: Activation, width: int) -> FeedForward:
    """The shared expert, whose gate and up are one tensor in safetensors."""
    if builder.hparams.is_gguf:
        return build_shared(builder, index, activation, width)
    hidden, base = builder.sizes.hidden_size, f"model.layers.{index}"
    parts = [(f"{base}.mlp.shared_experts.{name}_proj", width) for name in ("gate", "up")]
    gate, up = builder.fused(f"{base}.shared_mlp.input_linear", parts, hidden, bias=False)
    return FeedForward(
        activation, up, builder.linear(f"{base}.mlp.shared_experts.down_proj", hidden, width, bias=False), gate
    )  # fmt: skip


def _build(
    hparams: HyperParameters, feed_forwards: Callable[[SpecBuilder, Activation], Callable[[int], AnyFeedForward]]
) -> ModelSpec:
    """`logits_scaling` divides."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-6})
    builder = SpecBuilder(hparams, sizes, names=None if hparams.is_gguf else _NAMES)
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
    feed_forward = feed_forwards(builder, activation)
    layers = [
        Layer(
            mixer=builder.attention(
                index, rope=rope if has_rope else None, scale=scale, qkv_bias=qkv_bias, output_bias=output_bias
            ),
            feed_forward=feed_forward(index),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
            residual_scale=residual_scale,
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(layers, tied_by_default=False, embedding_scale=embedding_scale, logit_scale=1.0 / logit_divisor)
