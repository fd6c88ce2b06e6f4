"""`ModelSpec`: a model described, not programmed. Backends interpret it. Standard library only.

Canonical tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), whatever the checkpoint; fields
that hold one are of type `TensorName`, and `ModelSpec.tensors` says where each lies in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

TensorName = str


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where a canonical tensor lies: a checkpoint tensor, or a run of its rows (fused QKV, fused gate and up).

    Attributes:
        name: in the checkpoint.
        shape: expected shape of the canonical tensor, slowest dimension first.
        first_row: row of the checkpoint tensor at which it starts.
        fused: whether the checkpoint tensor holds more rows than these.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int = 0
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm or LayerNorm over the last dimension: `normalised * (weight + weight_offset) + bias`.

    `weight_offset` is 1 where the checkpoint stores weights around zero (gemma from Hugging Face).
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight: TensorName
    bias: TensorName | None = None
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x @ weight.T + bias`."""

    weight: TensorName
    out_features: int
    in_features: int
    bias: TensorName | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the first `2 * len(inverse_frequencies)` dimensions of a head.

    Attributes:
        pairing: `neox` pairs dimension i with i + size/2, `interleaved` 2 i with 2 i + 1.
        inverse_frequencies: radians per position, scaling (linear, llama-3, YaRN, longrope) applied; float32 values.
        magnitude: multiplies cosine and sine (YaRN, longrope).
    """

    pairing: Literal["neox", "interleaved"]
    inverse_frequencies: tuple[float, ...]
    magnitude: float = 1.0

    @property
    def size(self) -> int:
        """Rotated dimensions of a head."""
        return 2 * len(self.inverse_frequencies)


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal self-attention with grouped queries.

    Attributes:
        scale: multiplies q.k.
        rope: None for a layer without positions.
        window: a token sees itself and `window - 1` before it; None sees all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        q_norm, k_norm: applied before rope; over each head, or over the whole row (`qk_norm_axis`).
        sinks: float32 [num_heads], a logit per head that takes part in the softmax and has no value.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    rope: Rope | None = None
    window: int | None = None
    soft_cap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    qk_norm_axis: Literal["head", "row"] = "head"
    sinks: TensorName | None = None


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Dense feed-forward: `down(activation(gate(x)) * up(x))`, or without gate `down(activation(up(x)))`."""

    activation: Literal["silu", "gelu_tanh", "gelu"]
    up: Linear
    down: Linear
    gate: Linear | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer:

    x += residual_scale * post_attention_norm(attention(input_norm(x)))
    x += residual_scale * post_feedforward_norm(feed_forward(pre_feedforward_norm(x)))

    A norm that is None is left out.
    """

    attention: Attention
    feed_forward: FeedForward
    input_norm: Norm | None = None
    post_attention_norm: Norm | None = None
    pre_feedforward_norm: Norm | None = None
    post_feedforward_norm: Norm | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose KV blocks live and die together: full attention (`window` None) or one window."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model.

    Attributes:
        context_length: tokens it was made for.
        embedding: [vocab_size, hidden_size]; rows are multiplied by `embedding_scale`.
        head: its weight is `embedding` when tied.
        logit_scale: multiplies logits, before `logit_soft_cap`.
        tensors: canonical name to source, for every tensor that the spec names; loading is strict both ways.
        ignored_tensors: checkpoint names that are known and not needed.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    embedding: TensorName
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Linear
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    tensors: Mapping[TensorName, TensorSource] = field(default_factory=dict)
    ignored_tensors: frozenset[str] = frozenset()

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head.weight == self.embedding

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Groups in order of first appearance."""
        layers: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            layers.setdefault(layer.attention.window, []).append(index)
        return tuple(CacheGroup(window, tuple(members)) for window, members in layers.items())
