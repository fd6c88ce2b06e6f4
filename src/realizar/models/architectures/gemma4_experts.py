"""The mixture of Gemma 4's 26B-A4B: experts beside each layer's dense feed-forward, each with norms of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from realizar.models.dimensions import MAX_FEED_FORWARD
from realizar.models.expert_norms import ExpertNorms
from realizar.models.experts import MAX_EXPERTS, Joined, Mixture, read_expert_counts, read_expert_width
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Norm
from realizar.models.spec import Experts, FeedForward
from realizar.models.spec_builder import SpecBuilder

_JOINED = Joined(gate_up="experts.gate_up_proj", down="experts.down_proj")
_GGUF_SCALES = "ffn_down_exps.scale"


@dataclass(frozen=True, slots=True)
class GemmaMixture:
    """What the experts of all layers have in common; `has_scales` of factors of outputs."""

    plain: Mixture
    has_scales: bool

    def build(self, builder: SpecBuilder, index: int, dense: FeedForward) -> Experts:
        scales = None
        if self.has_scales:
            name, hf = "mlp.gate.per_expert_scale", "router.per_expert_scale"
            scales = builder.vector(index, name, self.plain.count, gguf=_GGUF_SCALES, hf=hf)
        norms = _norms(builder, index)
        return replace(self.plain.build(builder, index), shared=dense, expert_scales=scales, norms=norms)


def read_mixture(hparams: HyperParameters) -> GemmaMixture | None:
    """The sizes of a checkpoint's experts; None where it is dense."""
    if hparams.is_gguf:
        if not hparams.integer("expert_count", None, low=0, high=MAX_EXPERTS, default=0):
            hparams.integer("expert_used_count", None, low=0, high=MAX_EXPERTS, default=0)
            hparams.integer("expert_feed_forward_length", None, low=0, high=MAX_FEED_FORWARD, default=0)
            return None
    elif not hparams.boolean(None, "enable_moe_block", default=False):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):  # without effect
            hparams.raw(None, key)
        return None
    counts = read_expert_counts(hparams, used_hf_key="top_k_experts")
    key = "moe_intermediate_size"
    if not hparams.is_gguf and hparams.raw(None, key) is None and hparams.raw(None, "expert_intermediate_size"):
        key = "expert_intermediate_size"
    # A GGUF file that leaves the factors out does so in all layers: those of some alone were lost.
    has_scales = not hparams.is_gguf or any(name.endswith(f".{_GGUF_SCALES}") for name in hparams.checkpoint.tensors)
    return GemmaMixture(Mixture(*counts, read_expert_width(hparams, key), joined=_JOINED), has_scales)


def _norms(builder: SpecBuilder, index: int) -> ExpertNorms:
    base, hidden = f"model.layers.{index}", builder.sizes.hidden_size
    scale = builder.vector(index, "mlp.gate.scale", hidden, gguf="ffn_gate_inp.scale", hf="router.scale")
    # The router's norm is divided by the root of its width, and its weights are a tensor of their own.
    return ExpertNorms(
        router=Norm("rms", builder.sizes.norm_eps, scale, weight_scale=hidden**-0.5),
        experts=builder.norm(f"{base}.pre_feedforward_layernorm_2"),
        shared=builder.norm(f"{base}.pre_feedforward_layernorm"),
        experts_output=builder.norm(f"{base}.post_feedforward_layernorm_2"),
        shared_output=builder.norm(f"{base}.post_feedforward_layernorm_1"),
    )
