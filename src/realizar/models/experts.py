"""A mixture of experts as checkpoints hold it: one tensor for all experts, or one for each. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.errors import InvalidRequestError
from realizar.models.dimensions import MAX_FEED_FORWARD
from realizar.models.hyper_parameters import HyperParameters
from realizar.models.parts import Activation, Linear
from realizar.models.spec import ExpertLinear, Experts, FeedForward, Scoring
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization import is_packed

MAX_EXPERTS = 1024
_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid"}


def read_expert_count(hparams: HyperParameters, hf_key: str = "num_experts") -> int:
    """Experts of a layer. transformers 5 may write `num_local_experts` for the key of published configurations."""
    if hparams.raw(None, "num_local_experts") is None:
        return hparams.integer("expert_count", hf_key, high=MAX_EXPERTS)
    count = hparams.integer(None, "num_local_experts", high=MAX_EXPERTS)
    if hparams.integer(None, hf_key, high=MAX_EXPERTS, default=count) != count:
        raise hparams.malformed(None, hf_key, f"num_local_experts says {count}")
    return count


def read_experts_per_token(hparams: HyperParameters, count: int, hf_key: str = "num_experts_per_tok") -> int:
    """Experts that a token goes through; raises InvalidRequestError where more are configured than `count`."""
    stated = hparams.integer("expert_used_count", hf_key, high=count)
    wanted = hparams.requested_experts_per_token
    if wanted is not None and wanted > count:
        raise _too_many(wanted, count)
    return stated if wanted is None else wanted


def _too_many(wanted: int, count: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"expert_used_count {wanted} is not within 1 to the {count} experts that a token may choose from",
        "expert_used_count",
    )


def read_groups(hparams: HyperParameters, count: int, per_token: int) -> tuple[int, int]:
    keys, used_keys = ("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")
    groups = hparams.integer(*keys, high=count, default=1)
    used = hparams.integer(*used_keys, high=groups, default=groups)
    if count % groups:
        raise hparams.malformed(*keys, f"{groups} groups do not divide {count} experts")
    if used * (count // groups) < (hparams.requested_experts_per_token or 0):
        raise _too_many(per_token, used * (count // groups))
    if used * (count // groups) < per_token:
        raise hparams.malformed(*used_keys, f"{used} groups of {count // groups} have fewer than {per_token} experts")
    return groups, used


def read_scoring(hparams: HyperParameters, default: Scoring) -> Scoring:
    """The function that makes scores of a router's logits, which a GGUF file may name by llama.cpp's number."""
    number = hparams.integer("expert_gating_func", None, low=0, high=MAX_EXPERTS, default=0)
    if number not in _SCORINGS and number != 0:
        raise hparams.unsupported("expert_gating_func", None, number)
    return _SCORINGS.get(number, default)


def read_shared_width(hparams: HyperParameters, hf_key: str, width: int) -> int:
    """Width of a layer's shared experts, which are one; 0 without any. `hf_key` is of their number, `width` of each."""
    number = hparams.integer("expert_shared_count", hf_key, low=0, high=MAX_EXPERTS, default=0)
    return hparams.integer(
        "expert_shared_feed_forward_length", None, low=0, high=MAX_FEED_FORWARD, default=number * width
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joined:
    """A safetensors checkpoint's names of tensors that hold all experts of a layer, after `model.layers.0.`.

    Attributes:
        gate_up: the out_features of gate before those of up.
        transposed: they are [experts, in_features, out_features] where their numbers are plain; None if shapes tell.
        alternating: out_features of gate and up alternate, gate's first.
        bias: what a name has behind it for biases; None where experts have none.
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    transposed: bool | None = False
    alternating: bool = False
    bias: str | None = None


APART = Joined()
"""Most families': published apart, and joined as transformers 5 has them in memory."""


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
    joined: Joined = APART,
) -> Experts:
    """The mixture of layer `index`.

    A GGUF file holds three tensors, [experts, out_features, in_features] each, or two, of which the first has the
    out_features of gate before those of up. A safetensors checkpoint holds three matrices for each expert, or `joined`.

    Args:
        width: between an expert's up and down projection.
        normalized: the weights of the chosen ones are divided by their sum.

    Raises:
        UnsupportedModelError: a GGUF file says of the weights what this family does not do.
    """
    stated = builder.hparams.boolean("expert_weights_norm", None, default=normalized)
    if stated != normalized:
        raise builder.hparams.unsupported("expert_weights_norm", None, stated)
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


def build_shared(builder: SpecBuilder, index: int, activation: Activation, width: int) -> FeedForward:
    hidden, base = builder.sizes.hidden_size, f"model.layers.{index}.mlp.shared_experts"
    gate, up = (builder.linear(f"{base}.{name}_proj", width, hidden, bias=False) for name in ("gate", "up"))
    return FeedForward(activation, up, builder.linear(f"{base}.down_proj", hidden, width, bias=False), gate)


def build_shared_gate(builder: SpecBuilder, index: int) -> Linear:
    """The gate of what all tokens of layer `index` share: a matrix of one out_feature, a vector in a GGUF file."""
    name, hidden = f"model.layers.{index}.mlp.shared_expert_gate.weight", builder.sizes.hidden_size
    shape = (hidden,) if builder.hparams.is_gguf else None
    source = TensorSource(builder.stored_name(name), (1, hidden), stored_shape=shape)
    return Linear(builder.note(name, source), 1, hidden)


def build_selection_bias(
    builder: SpecBuilder, index: int, count: int, hf_name: str, *, in_row: bool = False
) -> TensorName:
    """The bias added to scores where experts are chosen; `in_row`: safetensors has it as a matrix of one row."""
    canonical = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
    if builder.hparams.is_gguf:
        return builder.note(canonical, TensorSource(f"blk.{index}.exp_probs_b.bias", (count,)))
    stored = builder.stored_name(f"model.layers.{index}.{hf_name}")
    return builder.note(canonical, TensorSource(stored, (count,), stored_shape=(1, count) if in_row else None))


@dataclass(frozen=True, slots=True)
class _Places:
    builder: SpecBuilder
    base: str
    joined: Joined

    def weight(self, name: str, shape: tuple[int, int, int]) -> TensorSource:
        if self.builder.hparams.is_gguf:
            return self._gguf(name, shape)
        if not self.builder.has(f"{self.base}.{self.joined.gate_up}"):
            return self._apart(name, shape)
        width, hidden = (shape[2], shape[1]) if name == "down_proj" else shape[1:]
        return self._part(name, shape, "", transposed=self._is_transposed(width, hidden))

    def bias(self, name: str, shape: tuple[int, int]) -> TensorSource:
        if self.builder.hparams.is_gguf:
            stored = self.builder.stored_name(f"{self.base}.mlp.experts.{name}.bias")
            return TensorSource(stored, shape, per_expert=True)
        return self._part(name, shape, self.joined.bias or "", per_expert=True)

    def _is_transposed(self, width: int, hidden: int) -> bool:
        """True if the two tensors are [experts, in_features, out_features]: one of them has a shape that tells."""
        checkpoint = self.builder.hparams.checkpoint
        gate_up, down = (
            self.builder.stored_name(f"{self.base}.{name}") for name in (self.joined.gate_up, self.joined.down)
        )
        if is_packed(checkpoint, gate_up):
            return False
        if self.joined.transposed is not None:
            return self.joined.transposed
        name, shape = (gate_up, (hidden, 2 * width)) if width == hidden else (down, (width, hidden))
        return name in checkpoint.tensors and checkpoint.tensors[name].shape[1:] == shape

    def _gguf(self, name: str, shape: tuple[int, int, int]) -> TensorSource:
        merged = f"{self.base}.mlp.experts.gate_up_proj.weight"
        if name == "down_proj" or not self.builder.has(merged):
            return TensorSource(self.builder.stored_name(f"{self.base}.mlp.experts.{name}.weight"), shape)
        first = shape[1] if name == "up_proj" else 0
        return TensorSource(self.builder.stored_name(merged), shape, first, fused=True)

    def _part(
        self, name: str, shape: tuple[int, ...], suffix: str, *, transposed: bool = False, per_expert: bool = False
    ) -> TensorSource:
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
        before, _, after = self.builder.stored_name(f"{self.base}.mlp.experts.0.{name}.weight").rpartition(".0.")
        names = tuple(f"{before}.{expert}.{after}" for expert in range(shape[0]))
        return TensorSource(names[0], shape, stack=names)
