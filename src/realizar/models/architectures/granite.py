"""Granite: Llama with multipliers on embedding, residual, attention and logits; dense or of experts."""

from __future__ import annotations

from collections.abc import Callable

from realizar.models.dimensions import MAX_FEED_FORWARD, read_dimensions
from realizar.models.experts import Joined, Mixture, read_expert_counts
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import AnyFeedForward, ModelSpec
from realizar.models.spec_builder import SpecBuilder

_NAMES = {
    "mlp.gate": "block_sparse_moe.router.layer",
    "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
}
_JOINED = Joined("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")


def build(hparams: HyperParameters) -> ModelSpec:
    builder = _start(hparams)
    bias = builder.bias("mlp_bias", "mlp.down_proj")
    return _build(builder, lambda index: builder.feed_forward(index, bias=bias))


def build_mixture(hparams: HyperParameters) -> ModelSpec:
    """Granite with experts, and with a shared one or without. The feed-forward length is that of one expert."""
    builder = _start(hparams)
    keys = ("expert_shared_feed_forward_length", "shared_intermediate_size")
    shared = hparams.integer(*keys, low=0, high=MAX_FEED_FORWARD, default=0)
    width = builder.sizes.feed_forward_size
    mixture = Mixture(*read_expert_counts(hparams), width, shared_width=shared, joined=_JOINED)
    return _build(builder, lambda index: mixture.build(builder, index))


def _start(hparams: HyperParameters) -> SpecBuilder:
    return SpecBuilder(hparams, read_dimensions(hparams, defaults={"rms_norm_eps": 1e-6}), names=_NAMES)


def _build(builder: SpecBuilder, feed_forward: Callable[[int], AnyFeedForward]) -> ModelSpec:
    """`logits_scaling` divides."""
    hparams = builder.hparams
    # A GGUF file says with this key that there are no positions at all.
    has_rope = hparams.boolean("rope.scaling.finetuned", None, default=True)
    rope = read_rope(hparams, builder.sizes, pairing="interleaved")
    scale = hparams.optional_number("attention.scale", "attention_multiplier")
    if scale is None and not hparams.is_gguf:
        scale = 1.0
    residual_scale = hparams.optional_number("residual_scale", "residual_multiplier") or 1.0
    embedding_scale = hparams.optional_number("embedding_scale", "embedding_multiplier") or 1.0
    logit_divisor = hparams.number("logit_scale", "logits_scaling", default=1.0)
    biases = builder.attention_biases()
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope if has_rope else None, scale=scale, biases=biases),
        feed_forward,
        residual_scale=residual_scale,
    )
    return builder.spec(layers, tied_by_default=False, embedding_scale=embedding_scale, logit_scale=1.0 / logit_divisor)
