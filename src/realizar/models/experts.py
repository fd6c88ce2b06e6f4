"""A mixture of experts as checkpoints hold it: one tensor for all experts, or one for each. Standard library only."""

from __future__ import annotations

from realizar.models.hyper_parameters import HyperParameters
from realizar.models.spec import Activation, ExpertLinear, Experts, TensorSource
from realizar.models.spec_builder import SpecBuilder

MAX_EXPERTS = 1024


def read_expert_count(hparams: HyperParameters) -> int:
    """Experts of a layer. transformers 5 writes `num_local_experts` for `num_experts` of published configurations."""
    if not hparams.is_present(None, "num_local_experts"):
        return hparams.integer("expert_count", "num_experts", high=MAX_EXPERTS)
    count = hparams.integer(None, "num_local_experts", high=MAX_EXPERTS)
    if hparams.integer(None, "num_experts", high=MAX_EXPERTS, default=count) != count:
        raise hparams.malformed(None, "num_experts", f"num_local_experts says {count}")
    return count


def build_experts(
    builder: SpecBuilder,
    index: int,
    activation: Activation,
    *,
    count: int,
    per_token: int,
    width: int,
    normalized: bool,
) -> Experts:
    """The mixture of layer `index`.

    A GGUF file holds three tensors, [experts, out_features, in_features] each. A safetensors checkpoint holds three
    matrices for each expert, or two tensors: `gate_up_proj`, with the out_features of gate before those of up, and
    `down_proj`.

    Args:
        count: experts of the layer.
        per_token: experts that a token goes through.
        width: between an expert's up and down projection.
        normalized: True if the weights of the chosen ones are divided by their sum.
    """
    hidden, base = builder.sizes.hidden_size, f"model.layers.{index}.mlp"
    router = builder.linear(f"{base}.gate", count, hidden, bias=False)
    stack = _fused_stack if _is_fused(builder, base) else _stack

    def matrices(name: str, out_features: int, in_features: int) -> ExpertLinear:
        source = stack(builder, base, name, (count, out_features, in_features))
        return ExpertLinear(builder.note(f"{base}.experts.{name}.weight", source), count, out_features, in_features)

    return Experts(
        router=router,
        experts_per_token=per_token,
        activation=activation,
        gate=matrices("gate_proj", width, hidden),
        up=matrices("up_proj", width, hidden),
        down=matrices("down_proj", hidden, width),
        normalized=normalized,
    )


def _is_fused(builder: SpecBuilder, base: str) -> bool:
    """True if a safetensors checkpoint holds one tensor for all experts, as transformers 5 has them in memory."""
    return not builder.hparams.is_gguf and builder.has(f"{base}.experts.gate_up_proj")


def _fused_stack(builder: SpecBuilder, base: str, name: str, shape: tuple[int, int, int]) -> TensorSource:
    if name == "down_proj":
        return TensorSource(builder.stored_name(f"{base}.experts.{name}"), shape)
    first_out_feature = shape[1] if name == "up_proj" else 0
    return TensorSource(builder.stored_name(f"{base}.experts.gate_up_proj"), shape, first_out_feature, fused=True)


def _stack(builder: SpecBuilder, base: str, name: str, shape: tuple[int, int, int]) -> TensorSource:
    if builder.hparams.is_gguf:
        return TensorSource(builder.stored_name(f"{base}.experts.{name}.weight"), shape)
    before, _, after = builder.stored_name(f"{base}.experts.0.{name}.weight").rpartition(".0.")
    names = tuple(f"{before}.{expert}.{after}" for expert in range(shape[0]))
    return TensorSource(names[0], shape, stack=names)
