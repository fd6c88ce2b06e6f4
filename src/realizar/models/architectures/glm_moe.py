"""GLM-4.5 to 4.7 with experts: sigmoids with a selection bias, a shared expert, and half of each head rotated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from realizar.models.dimensions import MAX_FEED_FORWARD, MAX_LAYERS, read_dimensions
from realizar.models.experts import (
    build_experts,
    build_selection_bias,
    build_shared,
    read_expert_count,
    read_experts_per_token,
    read_groups,
    read_scoring,
    read_shared_width,
)
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.next_token import next_token_tensors, read_next_token_blocks, without_next_token_blocks
from realizar.models.parts import Activation
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import Experts, Layer, ModelSpec
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_names import is_unneeded

_GGUF_NAMES = {"post_attention_layernorm": "post_attention_norm"}


def build(hparams: HyperParameters) -> ModelSpec:
    """GLM-4.5 with experts. A file's last layers may be those that draft tokens: known, and not run."""
    sizes = read_dimensions(hparams)
    drafting = read_next_token_blocks(hparams, "num_nextn_predict_layers")
    sizes = without_next_token_blocks(hparams, sizes, drafting)
    builder = SpecBuilder(hparams, sizes, names=_GGUF_NAMES if hparams.is_gguf else None)
    rope = read_rope(hparams, sizes, default_partial=0.5)
    keys, default = ("leading_dense_block_count", "first_k_dense_replace"), 0 if hparams.is_gguf else 1
    leading = hparams.integer(*keys, low=0, high=MAX_LAYERS, default=default)
    mixture, activation = _read_mixture(hparams), builder.activation()
    qkv_bias = builder.bias("attention_bias", "self_attn.q_proj")
    has_norm = builder.has("model.layers.0.self_attn.q_norm.weight") if hparams.is_gguf else False
    qk_norm = hparams.boolean(None, "use_qk_norm", default=has_norm)
    layers = [
        Layer(
            mixer=builder.attention(index, rope=rope, qkv_bias=qkv_bias, qk_norm="head" if qk_norm else None),
            feed_forward=builder.feed_forward(index, activation)
            if index < leading
            else mixture.build(builder, index, activation),
            input_norm=builder.norm(f"model.layers.{index}.input_layernorm"),
            pre_feedforward_norm=builder.norm(f"model.layers.{index}.post_attention_layernorm"),
        )
        for index in range(sizes.num_layers)
    ]

    return builder.spec(layers, tied_by_default=False, is_ignored=next_token_tensors(sizes, drafting, is_unneeded))


@dataclass(frozen=True, slots=True)
class _Mixture:
    count: int
    per_token: int
    width: int
    shared_width: int
    groups: tuple[int, int]
    normalized: bool
    scale: float

    def build(self, builder: SpecBuilder, index: int, activation: Activation) -> Experts:
        plain = build_experts(
            builder, index, activation, count=self.count, per_token=self.per_token, width=self.width,
            normalized=self.normalized,
        )  # fmt: skip
        return replace(
            plain,
            scale=self.scale,
            scoring=read_scoring(builder.hparams, "sigmoid"),
            num_groups=self.groups[0],
            groups_per_token=self.groups[1],
            selection_bias=build_selection_bias(builder, index, self.count, "mlp.gate.e_score_correction_bias"),
            shared=build_shared(builder, index, activation, self.shared_width) if self.shared_width else None,
        )


def _read_mixture(hparams: HyperParameters) -> _Mixture:
    count = read_expert_count(hparams, "n_routed_experts")
    per_token = read_experts_per_token(hparams, count)
    width = hparams.integer("expert_feed_forward_length", "moe_intermediate_size", high=MAX_FEED_FORWARD)
    return _Mixture(
        count,
        per_token,
        width,
        read_shared_width(hparams, "n_shared_experts", width),
        read_groups(hparams, count, per_token),
        hparams.boolean("expert_weights_norm", "norm_topk_prob", default=not hparams.is_gguf),
        hparams.number("expert_weights_scale", "routed_scaling_factor", default=1.0),
    )
