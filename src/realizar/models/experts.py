"""A mixture of experts as checkpoints hold it: one tensor for all experts, or one for each. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.models.hyper_parameters import HyperParameters
from realizar.models.spec import Activation, ExpertLinear, Experts
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization import is_packed

MAX_EXPERTS = 1024


def read_expert_count(hparams: HyperParameters, hf_key: str = "num_experts") -> int:
    """Experts of a layer. transformers 5 may write `num_local_experts` for the key of published configurations."""
    if not hparams.is_present(None, "num_local_experts"):
        return hparams.integer("expert_count", hf_key, high=MAX_EXPERTS)
    count = hparams.integer(None, "num_local_experts", high=MAX_EXPERTS)
    if hparams.integer(None, hf_key, high=MAX_EXPERTS, default=count) != count:
        raise hparams.malformed(None, hf_key, f"num_local_experts says {count}")
    return count


@dataclass(frozen=True, slots=True)
class Joined:
    """A safetensors checkpoint's names of tensors that hold all experts of a layer, after `model.layers.0.`.

    Attributes:
        gate_up: the out_features of gate before those of up. down: of the down projections.
        transposed: True if they are [experts, in_features, out_features] where their numbers are plain.
        alternating: True if out_features of gate and up alternate, gate's first.
        bias: what a name has behind it for biases; None where experts have none.
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    transposed: bool = False
    alternating: bool = False
    bias: str | None = None


def build_experts(
    builder: SpecBuilder,
    index: int,
    activation: Activation,
    *,
    count: int,
    per_token: int,
    width: int,
    normalized: bool,
    router_bias: bool = False,
    clamped: bool = False,
    joined: Joined = Joined(),
) -> Experts:
    """The mixture of layer `index`.

    A GGUF file holds three tensors, [experts, out_features, in_features] each, or two, of which the first has the
    out_features of gate before those of up. A safetensors checkpoint holds three matrices for each expert, or two
    tensors.

    Args:
        count: experts of the layer.
        per_token: experts that a token goes through.
        width: between an expert's up and down projection.
        normalized: True if the weights of the chosen ones are divided by their sum.
        joined: the two tensors of a safetensors checkpoint.
    """
    hidden, base = builder.sizes.hidden_size, f"model.layers.{index}"
    router = builder.linear(f"{base}.mlp.gate", count, hidden, bias=router_bias)
    places = _Places(builder, base, joined)

    def matrices(name: str, out_features: int, in_features: int) -> ExpertLinear:
        weight = builder.note(
            f"{base}.mlp.experts.{name}.weight", places.weight(name, (count, out_features, in_features))
        )  # fmt: skip
        bias: TensorName | None = None
        if joined.bias is not None:
            bias = builder.note(f"{base}.mlp.experts.{name}.bias", places.bias(name, (count, out_features)))
        return ExpertLinear(weight, count, out_features, in_features, bias)

    return Experts(
        router=router,
        experts_per_token=per_token,
        activation=activation,
        gate=matrices("gate_proj", width, hidden),
        up=matrices("up_proj", width, hidden),
        down=matrices("down_proj", hidden, width),
        normalized=normalized,
        clamped=clamped,
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a layer's experts lie."""

    builder: SpecBuilder
    base: str
    joined: Joined

    def weight(self, name: str, shape: tuple[int, int, int]) -> TensorSource:
        """All experts' matrices `name`, [experts, out_features, in_features]."""
        if self.builder.hparams.is_gguf:
            return self._gguf(name, shape)
        whole = self.builder.stored_name(f"{self.base}.{self.joined.gate_up}")
        if not self.builder.has(f"{self.base}.{self.joined.gate_up}"):
            return self._apart(name, shape)
        transposed = self.joined.transposed and not is_packed(self.builder.hparams.checkpoint, whole)
        return self._part(name, shape, "", transposed=transposed)

    def bias(self, name: str, shape: tuple[int, int]) -> TensorSource:
        """All experts' biases `name`, [experts, out_features]."""
        if self.builder.hparams.is_gguf:
            stored = self.builder.stored_name(f"{self.base}.mlp.experts.{name}.bias")
            return TensorSource(stored, shape, per_expert=True)
        return self._part(name, shape, self.joined.bias or "", per_expert=True)

    def _gguf(self, name: str, shape: tuple[int, int, int]) -> TensorSource:
        merged = f"{self.base}.mlp.experts.gate_up_proj.weight"
        if name == "down_proj" or not self.builder.has(merged):
            return TensorSource(self.builder.stored_name(f"{self.base}.mlp.experts.{name}.weight"), shape)
        first = shape[1] if name == "up_proj" else 0
        return TensorSource(self.builder.stored_name(merged), shape, first, fused=True)

    def _part(
        self, name: str, shape: tuple[int, ...], suffix: str, *, transposed: bool = False, per_expert: bool = False
    ) -> TensorSource:
        """Out_features of a tensor that holds all experts."""
        if name == "down_proj":
            stored = self.builder.stored_name(f"{self.base}.{self.joined.down}{suffix}")
            return TensorSource(stored, shape, transposed=transposed, per_expert=per_expert)
        is_up, step = name == "up_proj", 2 if self.joined.alternating else 1
        first = int(is_up) if self.joined.alternating else shape[1] * is_up
        stored = self.builder.stored_name(f"{self.base}.{self.joined.gate_up}{suffix}")
        return TensorSource(
            stored, shape, first, fused=True, step=step, transposed=transposed, per_expert=per_expert
        )  # fmt: skip

    def _apart(self, name: str, shape: tuple[int, int, int]) -> TensorSource:
        """A matrix for each expert."""
        before, _, after = self.builder.stored_name(f"{self.base}.mlp.experts.0.{name}.weight").rpartition(".0.")
        names = tuple(f"{before}.{expert}.{after}" for expert in range(shape[0]))
        return TensorSource(names[0], shape, stack=names)
