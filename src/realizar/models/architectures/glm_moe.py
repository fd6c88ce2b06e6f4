"""GLM-4.5 to 4.7 with experts: sigmoids with a selection bias, a shared expert, and half of each head rotated."""

from __future__ import annotations

from realizar.models.dimensions import MAX_LAYERS, read_dimensions
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
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Attention, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import GGUF_POST_ATTENTION


def build(hparams: HyperParameters) -> ModelSpec:
    """GLM-4.5 with experts. A file's last layer may be a next-token block."""
    sizes = read_dimensions(hparams)
    drafting = read_next_token_blocks(hparams, "num_nextn_predict_layers")
    sizes = without_next_token_blocks(hparams, sizes, drafting)
    builder = SpecBuilder(hparams, sizes, gguf_names=GGUF_POST_ATTENTION)
    rope = read_rope(hparams, sizes, default_partial=0.5)
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
