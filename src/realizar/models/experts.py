"""A mixture of experts as checkpoints hold it: one tensor for all experts, or one for each. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.errors import InvalidRequestError
from realizar.models.dimensions import MAX_FEED_FORWARD
from realizar.models.hyper_parameters import REQUIRED, HyperParameters, Required
from realizar.models.parts import Linear
from realizar.models.spec import ExpertLinear, Experts, Scoring
from realizar.models.spec_builder import SpecBuilder
from realizar.models.tensor_source import TensorName, TensorSource
from realizar.quantization.tensors import is_packed

MAX_EXPERTS = 1024
_SCORINGS: dict[int, Scoring] = {1: "softmax", 2: "sigmoid"}


def read_expert_counts(
    hparams: HyperParameters, hf_key: str = "num_experts", used_hf_key: str = "num_experts_per_tok"
) -> tuple[int, int]:
    """Experts of a layer, and those that a token goes through. InvalidRequestError: more are configured than there are.

    transformers 5 may write `num_local_experts` for the key of published configurations.
    """
    local = hparams.integer(None, "num_local_experts", high=MAX_EXPERTS, default=0)
    count = hparams.integer("expert_count", hf_key, high=MAX_EXPERTS, default=local or REQUIRED)
    if local not in (0, count):
        raise hparams.malformed(None, hf_key, f"num_local_experts says {local}")
    stated = hparams.integer("expert_used_count", used_hf_key, high=count)
    wanted = hparams.requested_experts_per_token
    if wanted is not None and wanted > count:
        raise _too_many(wanted, count)
    return count, stated if wanted is None else wanted


def _too_many(wanted: int, count: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"expert_used_count {wanted} is not within 1 to the {count} experts that a token may choose from",
        "expert_used_count",
    )


def read_expert_width(
    hparams: HyperParameters, hf_key: str = "moe_intermediate_size", default: int | Required = REQUIRED
) -> int:
    """Features between an expert's up and down projection."""
    return hparams.integer("expert_feed_forward_length", hf_key, high=MAX_FEED_FORWARD, default=default)


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


@dataclass(frozen=True, slots=True)
class Mixture:
    """What the mixtures of a model have in common; for `normalized`, `scale`, `scoring` and `clamped` see `Experts`.

    Of a layer a GGUF file holds three tensors, [experts, out_features, in_features] each, or two, of which the first
    has the out_features of gate before those of up. A safetensors checkpoint holds three matrices for each expert, or
    `joined`.

    Attributes:
        width: between an expert's up and down projection.
        groups: the number of groups, and how many of them a token chooses from.
        selection_bias: name in safetensors, after `model.layers.0.`, of the bias added to scores where experts are
            chosen; None where there is none. With `bias_in_row` it is a matrix of one row there.
        shared_width: of a feed-forward that every token goes through, maybe behind a gate; 0 where there is none.
    """

    count: int
    per_token: int
    width: int
    normalized: bool = True
    scale: float = 1.0
    scoring: Scoring = "softmax"
    groups: tuple[int, int] = (1, 1)
    selection_bias: str | None = None
    bias_in_row: bool = False
    router_bias: bool = False
    shared_width: int = 0
    has_shared_gate: bool = False
    clamped: bool = False
    joined: Joined = APART

    def build(self, builder: SpecBuilder, index: int) -> Experts:
        """The mixture of layer `index`; UnsupportedModelError where a GGUF file says of the weights what is not so."""
        stated = builder.hparams.boolean("expert_weights_norm", None, default=self.normalized)
        if stated != self.normalized:
            raise builder.hparams.unsupported("expert_weights_norm", None, stated)
        hidden, shared = builder.sizes.hidden_size, None
        if self.shared_width:
            shared = builder.feed_forward(index, part="mlp.shared_experts", width=self.shared_width)
        return Experts(
            router=builder.linear(f"model.layers.{index}.mlp.gate", self.count, hidden, bias=self.router_bias),
            experts_per_token=self.per_token,
            activation=builder.activation,
            gate=self._matrices(builder, index, "gate_proj", self.width, hidden),
            up=self._matrices(builder, index, "up_proj", self.width, hidden),
            down=self._matrices(builder, index, "down_proj", hidden, self.width),
            normalized=self.normalized,
            scale=self.scale,
            scoring=self.scoring,
            selection_bias=self._selection_bias(builder, index),
            num_groups=self.groups[0],
            groups_per_token=self.groups[1],
            shared=shared,
            shared_gate=_shared_gate(builder, index) if self.has_shared_gate else None,
            clamped=self.clamped,
        )

    def _matrices(
        self, builder: SpecBuilder, index: int, name: str, out_features: int, in_features: int
    ) -> ExpertLinear:
        base, shape = f"model.layers.{index}", (self.count, out_features, in_features)
        places, canonical = _Places(builder, base, self.joined), f"{base}.mlp.experts.{name}"
        weight = builder.note(f"{canonical}.weight", places.weight(name, shape))
        bias: TensorName | None = None
        if self.joined.bias is not None:
            bias = builder.note(f"{canonical}.bias", places.bias(name, shape[:2]))
        return ExpertLinear(weight, *shape, bias)

    def _selection_bias(self, builder: SpecBuilder, index: int) -> TensorName | None:
        if self.selection_bias is None:
            return None
        return builder.vector(
            index,
            "mlp.gate.e_score_correction_bias",
            self.count,
            gguf="exp_probs_b.bias",
            hf=self.selection_bias,
            stored_shape=(1, self.count) if self.bias_in_row else None,
        )


def _shared_gate(builder: SpecBuilder, index: int) -> Linear:
    """A matrix of one out_feature, a vector in a GGUF file."""
    name, hidden = f"model.layers.{index}.mlp.shared_expert_gate.weight", builder.sizes.hidden_size
    shape = (hidden,) if builder.hparams.is_gguf else None
    source = TensorSource(builder.stored_name(name), (1, hidden), stored_shape=shape)
    return Linear(builder.note(name, source), 1, hidden)


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
