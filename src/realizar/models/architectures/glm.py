"""GLM-4, dense, and GLM-4.5 to 4.7 with experts, also as the text models of GLM-4.1V to 4.6V. Half of each head is
rotated, as a rope of three axes in the models that see.
"""

from __future__ import annotations

from realizar.models.architectures.qwen import with_axes
from realizar.models.dimensions import MAX_LAYERS, Dimensions, read_dimensions
from realizar.models.experts import (
    Mixture,
    read_expert_counts,
    read_expert_width,
    read_groups,
    read_scoring,
    read_shared_width,
)
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.next_token import (
    next_token_block,
    next_token_tensors,
    read_next_token_blocks,
    without_next_token_blocks,
)
from realizar.models.parts import Rope
from realizar.models.rope_parameters import Pairing, read_rope
from realizar.models.spec import Attention, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION

_DENSE_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def build(hparams: HyperParameters, *, is_part: bool = False) -> ModelSpec:
    """GLM-4 (0414), with norms before and after attention and feed-forward; with `is_part` the text model of GLM-4.1V.

    Neighbouring dimensions are rotated, but in GGUF files of models that see, whose Q and K converters reorder.
    """
    defaults = {"rms_norm_eps": 1e-5} if is_part else {"rms_norm_eps": 1.5625e-07, "head_dim": 128}
    sizes = read_dimensions(hparams, defaults=defaults)
    builder = SpecBuilder(hparams, sizes, is_part=is_part, names=_DENSE_NAMES, gguf_names=GGUF_POST_ATTENTION)
    rope = _read_rope(hparams, sizes, "interleaved", is_part=is_part, default_partial=1.0 if is_part else 0.5)
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj", default=is_part)
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, biases=(qkv_bias, False)), builder.feed_forward, norms="both"
    )
    return builder.spec(layers, tied_by_default=False)


def _read_rope(
    hparams: HyperParameters, sizes: Dimensions, pairing: Pairing, *, is_part: bool, default_partial: float
) -> Rope:
    """`pairing` is that of configurations, and of GGUF files of models that do not see."""
    sees = is_part or hparams.is_present("rope.dimension_sections", None)
    rope = read_rope(
        hparams,
        sizes,
        pairing="neox" if sees else pairing,
        config_pairing=pairing,
        has_axes=is_part,
        default_partial=default_partial,
    )
    return with_axes(hparams, rope, interleaved=False) if sees else rope


def build_mixture(hparams: HyperParameters, *, is_part: bool = False) -> ModelSpec:
    """GLM-4.5 with experts: sigmoids with a selection bias, and a shared expert; with `is_part` the text model of
    GLM-4.5V. A file's last layer may be a next-token block.
    """
    sizes = read_dimensions(hparams)
    drafting = read_next_token_blocks(hparams, "num_nextn_predict_layers")
    sizes = without_next_token_blocks(hparams, sizes, drafting)
    builder = SpecBuilder(hparams, sizes, is_part=is_part, gguf_names=GGUF_POST_ATTENTION)
    rope = _read_rope(hparams, sizes, "neox", is_part=is_part, default_partial=0.5)
    keys, default = ("leading_dense_block_count", "first_k_dense_replace"), 0 if hparams.is_gguf else 1
    leading = hparams.integer(*keys, low=0, high=MAX_LAYERS, default=default)
    mixture = _read_mixture(hparams)
    first = sizes.num_layers if hparams.drafts else 0
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj", layer=first)
    has_norm = builder.has(f"model.layers.{first}.self_attn.q_norm.weight") if hparams.is_gguf else False
    qk_norm = hparams.boolean(None, "use_qk_norm", default=has_norm)

    def attention(index: int) -> Attention:
        return builder.attention(index, rope=rope, biases=(qkv_bias, False), qk_norm="head" if qk_norm else None)

    if hparams.drafts:
        return next_token_block(
            builder, drafting, attention, lambda index: mixture.build(builder, index), tied_by_default=False
        )
    layers = builder.layers(
        attention, lambda index: builder.feed_forward(index) if index < leading else mixture.build(builder, index)
    )
    return builder.spec(layers, tied_by_default=False, is_ignored=next_token_tensors(sizes, drafting))


def _read_mixture(hparams: HyperParameters) -> Mixture:
    counts, width = read_expert_counts(hparams, "n_routed_experts"), read_expert_width(hparams)
    return Mixture(
        *counts,
        width,
        normalized=hparams.boolean("expert_weights_norm", "norm_topk_prob", default=not hparams.is_gguf),
        scale=hparams.number("expert_weights_scale", "routed_scaling_factor", default=1.0),
        scoring=read_scoring(hparams, "sigmoid"),
        groups=read_groups(hparams, *counts),
        selection_bias="mlp.gate.e_score_correction_bias",
        shared_width=read_shared_width(hparams, "n_shared_experts", width),
    )
