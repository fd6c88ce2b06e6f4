"""`ModelSpec`: the description of a model, which backends interpret. Standard library only.

Canonical tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), whatever the checkpoint; fields
that hold one are of type `TensorName`, and `ModelSpec.tensors` gives the place of each in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from realizar.cache_kinds import CacheKind, StateCache, attention_cache

TensorName = str
Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The place of a canonical tensor: a checkpoint tensor, a range of its out_features, or a stack.

    Attributes:
        name: in the checkpoint; the first of `stack` where there is one.
        shape: expected shape of the canonical tensor, slowest dimension first.
        first_out_feature: of the checkpoint tensor, at which it starts; of each of its matrices where it is a stack.
        fused: True if the checkpoint tensor (QKV, gate and up) has more out_features than these.
        stack: checkpoint tensors of shape `shape[1:]`, one for each index of the first dimension, where the checkpoint
            keeps experts apart; empty where one tensor holds all.
        stored_shape: shape in the checkpoint where that has dimensions of one beside `shape`; else None.
    """

    name: str
    shape: tuple[int, ...]
    first_out_feature: int = 0
    fused: bool = False
    stack: tuple[str, ...] = ()
    stored_shape: tuple[int, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All checkpoint tensors that this one is read from."""
        return self.stack or (self.name,)


def out_feature_axis(shape: tuple[int, ...]) -> int:
    """The dimension of out_features: the second last of matrices and of stacks of them, the only one of vectors."""
    return max(len(shape) - 2, 0)


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

    def vectors(self) -> Iterator[TensorName]:
        """Weight, and bias if there is one."""
        yield self.weight
        if self.bias is not None:
            yield self.bias


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
class QueryGrowth:
    """Queries are multiplied by `1 + factor * ln(1 + floor(position / period))`, after rope.

    Attributes:
        period: tokens.
    """

    factor: float
    period: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal self-attention with grouped queries.

    Attributes:
        scale: multiplies q.k.
        rope: None for a layer without positions.
        window: a token sees itself and `window - 1` before it; None sees all.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        q_norm, k_norm: applied before rope; over each head, or over all heads of a token (`qk_norm_axis`).
        sinks: float32 [num_heads], a logit per head that takes part in the softmax and has no value.
        query_growth: of queries with the position; None where they do not grow.
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
    qk_norm_axis: Literal["head", "token"] = "head"
    sinks: TensorName | None = None
    query_growth: QueryGrowth | None = None

    @property
    def cache_kind(self) -> CacheKind:
        """Kind of the cache group that a layer with this mixer belongs to."""
        return attention_cache(self.window)

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they are multiplied."""
        return self.q, self.k, self.v, self.o

    def vectors(self) -> Iterator[TensorName]:
        """Its tensors other than matrices and the biases of matrices."""
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                yield from norm.vectors()
        if self.sinks is not None:
            yield self.sinks


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Gated short convolution over each channel's last tokens (LFM2).

    b, c, x = the three thirds of in_proj(input), in this order, [channels] each
    y[t] = c[t] * (sum over j < length of kernel[:, j] * (b * x)[t - (length - 1) + j]  + bias)
    output = out_proj(y)

    Tokens before the first count as zeros. A sequence keeps the last `length - 1` columns of b * x from step to step.

    Attributes:
        in_proj: to 3 * channels features.
        kernel: [channels, length].
        bias: [channels], or None.
    """

    channels: int
    length: int
    in_proj: Linear
    kernel: TensorName
    out_proj: Linear
    bias: TensorName | None = None

    @property
    def cache_kind(self) -> CacheKind:
        """Kind of the cache group that a layer with this mixer belongs to."""
        return StateCache()

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they are multiplied."""
        return self.in_proj, self.out_proj

    def vectors(self) -> Iterator[TensorName]:
        """Its tensors other than matrices and the biases of matrices."""
        yield self.kernel
        if self.bias is not None:
            yield self.bias


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Dense feed-forward: `down(activation(gate(x)) * up(x))`, or without gate `down(activation(up(x)))`."""

    activation: Activation
    up: Linear
    down: Linear
    gate: Linear | None = None

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they are multiplied."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A matrix for each expert: `y = x @ weight[expert].T`.

    Attributes:
        weight: [num_experts, out_features, in_features].
    """

    weight: TensorName
    num_experts: int
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: each token goes through few of many gated feed-forwards.

    scores = softmax(router(x)), over all experts, in float32
    chosen = the `experts_per_token` experts with the highest scores; of equal scores the lower index
    weights = scores[chosen], divided by their sum if `normalized`, times `scale`
    output = sum over the chosen of weights[e] * down[e](activation(gate[e](x)) * up[e](x))
    """

    router: Linear
    experts_per_token: int
    activation: Activation
    gate: ExpertLinear
    up: ExpertLinear
    down: ExpertLinear
    normalized: bool = True
    scale: float = 1.0

    @property
    def num_experts(self) -> int:
        """Experts that the router chooses from."""
        return self.router.out_features

    def linears(self) -> tuple[Linear, ...]:
        """The matrix that every token is multiplied with."""
        return (self.router,)

    def expert_linears(self) -> tuple[ExpertLinear, ...]:
        """The matrices of the experts, in the order in which they are multiplied."""
        return self.gate, self.up, self.down


Mixer = Attention | ShortConvolution
"""The part of a layer that lets tokens see those before them."""

AnyFeedForward = FeedForward | Experts
"""The part of a layer that takes each token by itself."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer:

    x += residual_scale * post_mixer_norm(mixer(input_norm(x)))
    x += residual_scale * post_feedforward_norm(feed_forward(pre_feedforward_norm(x)))

    A norm that is None is left out. Where the mixer or the feed-forward is None, so is its line, with its norms.
    """

    mixer: Mixer | None
    feed_forward: AnyFeedForward | None
    input_norm: Norm | None = None
    post_mixer_norm: Norm | None = None
    pre_feedforward_norm: Norm | None = None
    post_feedforward_norm: Norm | None = None
    residual_scale: float = 1.0

    def linears(self) -> tuple[Linear, ...]:
        """All matrices that every token is multiplied with, in order."""
        return tuple(
            linear for part in (self.mixer, self.feed_forward) if part is not None for linear in part.linears()
        )

    def vectors(self) -> Iterator[TensorName]:
        """Norms, sinks and convolution kernels, but no biases of matrices."""
        for norm in (self.input_norm, self.post_mixer_norm, self.pre_feedforward_norm, self.post_feedforward_norm):
            if norm is not None:
                yield from norm.vectors()
        if self.mixer is not None:
            yield from self.mixer.vectors()


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same tokens of a sequence, and so share block tables."""

    kind: CacheKind
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
        """True if the head is the embedding."""
        return self.head.weight == self.embedding

    def attentions(self) -> tuple[tuple[int, Attention], ...]:
        """Layers whose mixer is attention: index and mixer."""
        return tuple(
            (index, layer.mixer) for index, layer in enumerate(self.layers) if isinstance(layer.mixer, Attention)
        )

    def feed_forwards(self) -> tuple[tuple[int, FeedForward], ...]:
        """Layers with a dense feed-forward: index and feed-forward."""
        parts = ((index, layer.feed_forward) for index, layer in enumerate(self.layers))
        return tuple((index, part) for index, part in parts if isinstance(part, FeedForward))

    def mixtures(self) -> tuple[tuple[int, Experts], ...]:
        """Layers with a mixture of experts: index and mixture."""
        parts = ((index, layer.feed_forward) for index, layer in enumerate(self.layers))
        return tuple((index, part) for index, part in parts if isinstance(part, Experts))

    def matrices(self) -> tuple[Linear | ExpertLinear, ...]:
        """All matrices layer by layer, those of experts after their router, and the head."""
        found: list[Linear | ExpertLinear] = []
        for layer in self.layers:
            found += layer.linears()
            if isinstance(layer.feed_forward, Experts):
                found += layer.feed_forward.expert_linears()
        return (*found, self.head)

    def linears(self) -> tuple[Linear, ...]:
        """All matrices that every token is multiplied with, layer by layer, and the head."""
        return (*(linear for layer in self.layers for linear in layer.linears()), self.head)

    def vectors(self) -> tuple[TensorName, ...]:
        """Norms, sinks and convolution kernels of all layers, and the final norm, but no biases of matrices."""
        return (*(name for layer in self.layers for name in layer.vectors()), *self.final_norm.vectors())

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Groups in order of first appearance; layers without a mixer are in none."""
        layers: dict[CacheKind, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.mixer is not None:
                layers.setdefault(layer.mixer.cache_kind, []).append(index)
        return tuple(CacheGroup(kind, tuple(members)) for kind, members in layers.items())
