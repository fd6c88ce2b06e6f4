"""The mixture of Gemma 4's 26B-A4B: experts beside each layer's dense feed-forward, each with norms of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from realizar.models.dimensions import MAX_FEED_FORWARD
from realizar.models.expert_norms import ExpertNorms
from realizar.models.experts import MAX_EXPERTS, Joined, build_experts, read_expert_count, read_experts_per_token
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Activation, Norm
from realizar.models.spec import Experts, FeedForward
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_source import TensorName, TensorSource

_JOINED = Joined(gate_up="experts.gate_up_proj", down="experts.down_proj")
_ROUTER = "model.layers.{}.mlp.gate"
_GGUF_SCALES = "ffn_down_exps.scale"


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the experts of all layers have in common; `width` is of one, `has_scales` of factors of outputs."""

    count: int
    per_token: int
    width: int
    has_scales: bool

    def build(self, builder: SpecBuilder, index: int, activation: Activation, dense: FeedForward) -> Experts:
        experts = build_experts(
            builder, index, activation, count=self.count, per_token=self.per_token, width=self.width, normalized=True,
            joined=_JOINED,
        )  # fmt: skip
        return replace(
            experts,
            shared=dense,
            expert_scales=self._expert_scales(builder, index),
            norms=_norms(builder, index),
        )

    def _expert_scales(self, builder: SpecBuilder, index: int) -> TensorName | None:
        if not self.has_scales:
            return None
        stored = _stored_name(builder, index, "router.per_expert_scale", _GGUF_SCALES)
        return builder.note(f"{_ROUTER.format(index)}.per_expert_scale", TensorSource(stored, (self.count,)))


def router_names(is_gguf: bool) -> dict[str, str] | None:
    return None if is_gguf else {"mlp.gate": "router.proj"}


def read_mixture(hparams: HyperParameters) -> Mixture | None:
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
    count = read_expert_count(hparams)
    per_token = read_experts_per_token(hparams, count, "top_k_experts")
    return Mixture(count, per_token, _read_width(hparams), _has_scales(hparams))


def _has_scales(hparams: HyperParameters) -> bool:
    """False for a GGUF file that leaves the factors out, of all layers: those of some alone were lost."""
    return not hparams.is_gguf or any(name.endswith(f".{_GGUF_SCALES}") for name in hparams.checkpoint.tensors)


def _read_width(hparams: HyperParameters) -> int:
    key = "moe_intermediate_size"
    if not hparams.is_gguf and hparams.raw(None, key) is None and hparams.raw(None, "expert_intermediate_size"):
        key = "expert_intermediate_size"
    return hparams.integer("expert_feed_forward_length", key, high=MAX_FEED_FORWARD)


def _norms(builder: SpecBuilder, index: int) -> ExpertNorms:
    base = f"model.layers.{index}"
    norm: Callable[[str], Norm] = builder.norm
    scale = builder.note(
        f"{_ROUTER.format(index)}.scale",
        TensorSource(
            _stored_name(builder, index, "router.scale", "ffn_gate_inp.scale"), (builder.sizes.hidden_size,)
        ),
    )  # fmt: skip
    # The router's norm is divided by the root of its width, and its weights are a tensor of their own.
    router = Norm("rms", builder.sizes.norm_eps, scale, weight_scale=builder.sizes.hidden_size**-0.5)
    return ExpertNorms(
        router=router,
        experts=norm(f"{base}.pre_feedforward_layernorm_2"),
        shared=norm(f"{base}.pre_feedforward_layernorm"),
        experts_output=norm(f"{base}.post_feedforward_layernorm_2"),
        shared_output=norm(f"{base}.post_feedforward_layernorm_1"),
    )


def _stored_name(builder: SpecBuilder, index: int, hf_name: str, gguf_name: str) -> str:
    if builder.hparams.is_gguf:
        return f"blk.{index}.{gguf_name}"
    return builder.stored_name(f"model.layers.{index}.{hf_name}")
