"""ERNIE 4.5: Llama whose rotated pairs are neighbours in every form, dense or of experts. Standard library only."""

from __future__ import annotations

from collections.abc import Callable

from realizar.models.dimensions import MAX_LAYERS, Dimensions, read_dimensions
from realizar.models.experts import (
    Mixture,
    read_expert_counts,
    read_expert_width,
    read_scoring,
    read_shared_width,
)
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import AnyFeedForward, ModelSpec
from realizar.models.spec_builder import SpecBuilder

_LEAST_SUM = 1e-6  # the least sum of the chosen weights that published models divide by is far below
_DRAFTING = ("model.mtp_block.", "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.")


def build(hparams: HyperParameters) -> ModelSpec:
    sizes = read_dimensions(hparams, defaults={"head_dim": 128, "rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    mlp_bias = builder.bias("use_bias", "mlp.down_proj")
    return _build(builder, lambda index: builder.feed_forward(index, bias=mlp_bias))


def build_mixture(hparams: HyperParameters) -> ModelSpec:
    """ERNIE 4.5 with experts after leading dense layers; what drafts tokens in its files is known and not run."""
    sizes = read_dimensions(hparams, defaults={"rms_norm_eps": 1e-5})
    builder = SpecBuilder(hparams, sizes)
    is_mixture = _read_layers(hparams, sizes)
    counts = read_expert_counts(hparams, "moe_num_experts", "moe_k")
    width = read_expert_width(hparams)
    has_bias = not hparams.is_gguf or any(name.endswith(".exp_probs_b.bias") for name in hparams.checkpoint.tensors)
    mixture = Mixture(
        *counts,
        width,
        scoring=read_scoring(hparams, "softmax"),
        selection_bias="mlp.moe_statics.e_score_correction_bias" if has_bias else None,
        bias_in_row=True,
        shared_width=read_shared_width(hparams, "moe_num_shared_experts", width),
    )
    _read_mixture(hparams)
    mlp_bias = builder.bias("use_bias", "mlp.down_proj")

    def feed_forward(index: int) -> AnyFeedForward:
        return mixture.build(builder, index) if is_mixture[index] else builder.feed_forward(index, bias=mlp_bias)

    return _build(builder, feed_forward, head_bias=builder.bias("use_bias", "lm_head"))


def _read_mixture(hparams: HyperParameters) -> None:
    hparams.number(None, "moe_norm_min", default=1e-12, high=_LEAST_SUM)
    hparams.only(None, "moe_gate", "topk")
    hparams.only(None, "moe_use_aux_free", True)
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
    builder: SpecBuilder, feed_forward: Callable[[int], AnyFeedForward], *, head_bias: bool = False
) -> ModelSpec:
    hparams, sizes = builder.hparams, builder.sizes
    default_base = 10000.0 if hparams.is_gguf else 500000.0
    rope = read_rope(hparams, sizes, pairing="interleaved", config_pairing="interleaved", default_base=default_base)
    biases = builder.attention_biases("use_bias")
    layers = builder.layers(lambda index: builder.attention(index, rope=rope, biases=biases), feed_forward)
    return builder.spec(
        layers, tied_by_default=True, head_bias=head_bias, is_ignored=lambda name: name.startswith(_DRAFTING)
    )
