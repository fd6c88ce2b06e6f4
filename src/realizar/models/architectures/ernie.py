"""ERNIE 4.5: Llama whose rotated pairs are neighbours in every form, dense or of experts. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from realizar.models.dimensions import MAX_FEED_FORWARD, MAX_LAYERS, Dimensions, read_dimensions
from realizar.models.experts import (
    build_experts,
    build_selection_bias,
    build_shared,
    read_expert_count,
    read_experts_per_token,
    read_scoring,
    read_shared_width,
)
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Activation
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import AnyFeedForward, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import is_unneeded

_LEAST_SUM = 1e-6  # the least sum of the chosen weights that published models divide by is far below
_DRAFTING = ("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")


def build(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams, defaults={"head_dim": 128, "rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    mlp_bias = builder.bias("use_bias", "mlp.down_proj")
    return _build(builder, lambda index, activation: builder.feed_forward(index, activation, bias=mlp_bias))


def build_mixture(hparams: HyperParameters) -> ModelSpec:
    """ERNIE 4.5 with experts after leading dense layers; what drafts tokens in its files is known and not run."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    is_mixture = _read_layers(hparams, sizes)
    count = read_expert_count(hparams, "moe_num_experts")
    per_token = read_experts_per_token(hparams, count, "moe_k")
    width = hparams.integer("expert_feed_forward_length", "moe_intermediate_size", high=MAX_FEED_FORWARD)
    shared, scoring = read_shared_width(hparams, "moe_num_shared_experts", width), read_scoring(hparams, "softmax")
    _read_mixture(hparams)
    mlp_bias = builder.bias("use_bias", "mlp.down_proj")
    has_bias = not hparams.is_gguf or any(name.endswith(".exp_probs_b.bias") for name in hparams.checkpoint.tensors)

    def feed_forward(index: int, activation: Activation) -> AnyFeedForward:
        if not is_mixture[index]:
            return builder.feed_forward(index, activation, bias=mlp_bias)
        plain = build_experts(
            builder, index, activation, count=count, per_token=per_token, width=width, normalized=True
        )  # fmt: skip
        name = "mlp.moe_statics.e_score_correction_bias"
        return replace(
            plain,
            scoring=scoring,
            selection_bias=build_selection_bias(builder, index, count, name, in_row=True) if has_bias else None,
            shared=build_shared(builder, index, activation, shared) if shared else None,
        )

    return _build(builder, feed_forward, head_bias=builder.bias("use_bias", "lm_head"))


def _read_mixture(hparams: HyperParameters) -> None:
    hparams.number(None, "moe_norm_min", default=1e-12, high=_LEAST_SUM)
    for key, value in (("moe_gate", "topk"), ("moe_use_aux_free", True)):
        if hparams.raw(None, key) not in (None, value):
            raise hparams.unsupported(None, key, hparams.raw(None, key))
    for key in ("moe_capacity", "num_nextn_predict_layers"):  # of training, and layers that draft
        hparams.raw(None, key)


def _read_layers(hparams: HyperParameters, sizes: Dimensions) -> list[bool]:
    """Layers with experts: every so many, between the first and the last of them."""
    count = sizes.num_layers
    first = hparams.integer("leading_dense_block_count", "moe_layer_start_index", low=0, high=MAX_LAYERS, default=1)
    last = hparams.integer(None, "moe_layer_end_index", low=-1, high=MAX_LAYERS, default=-1)
    step = hparams.integer("interleave_moe_layer_step", "moe_layer_interval", high=MAX_LAYERS, default=1)
    return [
        (index + 1) % step == 0 and first <= index <= (last % count if last < 0 else last) for index in range(count)
    ]


def _build(
    builder: SpecBuilder, feed_forward: Callable[[int, Activation], AnyFeedForward], *, head_bias: bool = False
) -> ModelSpec:
    hparams, sizes = builder.hparams, builder.sizes
    default_base = 10000.0 if hparams.is_gguf else 500000.0
    rope = read_rope(hparams, sizes, pairing="interleaved", config_pairing="interleaved", default_base=default_base)
    if hparams.is_gguf and rope.size != sizes.head_size:
        raise hparams.unsupported("rope.dimension_count", None, rope.size)
    activation = builder.activation()
    qkv_bias = builder.bias("use_bias", "self_attn.q_proj")
    output_bias = builder.bias("use_bias", "self_attn.o_proj")
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, qkv_bias=qkv_bias, output_bias=output_bias),
            feed_forward=feed_forward(index, activation),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]
    return builder.spec(
        layers,
        tied_by_default=True,
        head_bias=head_bias,
        is_ignored=lambda name: is_unneeded(name) or name.startswith(_DRAFTING),
    )
