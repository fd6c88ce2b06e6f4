"""MiniMax-M2: norms over all heads of Q and K, each head rotated in part, experts chosen by sigmoids with a bias."""

from __future__ import annotations

from realizar.models.architectures.llama import MIXTRAL_NAMES
from realizar.models.dimensions import Dimensions, read_dimensions
from realizar.models.experts import Mixture, read_expert_counts, read_expert_width, read_scoring
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.rope_parameters import read_rope
from realizar.models.spec import ModelSpec
from realizar.models.spec_builder import SpecBuilder

# What published configurations say of other models of the family, beside what all of M2 have.
_ONLY = {
    "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
}  # fmt: skip
_UNUSED = ("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp", "shared_moe_mode")


def build_m2(hparams: HyperParameters) -> ModelSpec:
    """The feed-forward length of its configurations is that of one expert."""
    sizes = read_dimensions(hparams, defaults={"head_dim": 128})
    builder = SpecBuilder(hparams, sizes, names=MIXTRAL_NAMES)
    _read_family(hparams, sizes)
    rotated = hparams.integer(None, "rotary_dim", low=2, high=sizes.head_size, default=sizes.head_size)
    default_base, part = 10000.0 if hparams.is_gguf else 5e6, rotated / sizes.head_size
    rope = read_rope(hparams, sizes, default_base=default_base, default_partial=part)
    mixture = Mixture(
        *read_expert_counts(hparams),
        read_expert_width(hparams, "intermediate_size"),
        scoring=read_scoring(hparams, "sigmoid"),
        selection_bias="block_sparse_moe.e_score_correction_bias",
    )
    layers = builder.layers(
        lambda index: builder.attention(index, rope=rope, qk_norm="token"),
        lambda index: mixture.build(builder, index),
    )
    return builder.spec(layers, tied_by_default=False)


def _read_family(hparams: HyperParameters, sizes: Dimensions) -> None:
    """Refuse what other models of the family have: linear attention, a shared expert, other norms and scores."""
    for key, value in _ONLY.items():
        hparams.only(None, key, value)
    for key in _UNUSED:
        hparams.raw(None, key)
    for key in ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"):
        if hparams.number(None, key, default=1.0) != 1.0:
            raise hparams.unsupported(None, key, hparams.raw(None, key))
    hparams.only(None, "attn_type_list", [1] * sizes.num_layers)
