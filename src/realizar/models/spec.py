"""`ModelSpec`: the description of a model, which backends interpret. Standard library only.

Canonical tensor names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), whatever the checkpoint; fields
that hold one are of type `TensorName`, and `ModelSpec.tensors` gives the place of each in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

from realizar.models.expert_norms import ExpertNorms
from realizar.models.layer_inputs import InputGate, LayerInputs
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.parts import (
    Activation,
    AssistantInputs,
    BlockInputs,
    Fusion,
    Linear,
    NextTokenInputs,
    Norm,
    PairedInputs,
    QueryGrowth,
    Rope,
    Share,
)
from realizar.models.tensor_source import TensorName, TensorSource

Scoring = Literal["softmax", "sigmoid"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The numbers of `Experts.clamped`."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal self-attention with grouped queries.

    Attributes:
        scale: multiplies q.k.
        rope: None for a layer without positions.
        window: a token sees itself and `window - 1` before it; None sees all. For the patches of a picture see `Tower`.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        q_norm, k_norm: applied before rope; over each head, or over all heads of a token, those of other ranks among
            them (`qk_norm_axis`).
        sinks: float32 [num_heads], a logit per head that takes part in the softmax and has no value.
        query_growth: of queries with the position; None where they do not grow.
        v_norm_eps: each head of V is divided by its root mean square, and this is added before the root; None leaves V
            as it is. V may be the same matrix as K, which gets norm and rope of its own.
        gate: to num_heads * head_size features of the layer's input, whose sigmoids multiply what `o` reads; None where
            there is none.
        sees_images_whole: the tokens of an image see those after them too, up to its end, where the image wants it
            (`PromptEmbeddings.is_seen_whole`); a window reaches back as for others.
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
    v_norm_eps: float | None = None
    gate: Linear | None = None
    sees_images_whole: bool = False

    @property
    def is_k_also_v(self) -> bool:
        """True if one product is both: V takes it before the norm and rope of K, which are by head."""
        return self.v == self.k and self.qk_norm_axis == "head" and self.gate is None

    def linears(self) -> tuple[Linear, ...]:
        """Its matrices, in the order in which they are multiplied."""
        return *self.inputs(), self.o

    def inputs(self) -> tuple[Linear, ...]:
        """The matrices that read the layer's input: q, k, v, and the gate where there is one."""
        return (self.q, self.k, self.v) if self.gate is None else (self.q, self.k, self.v, self.gate)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Dense feed-forward: `down(activation(gate(x)) * up(x))`, or without gate `down(activation(up(x)))`."""

    activation: Activation
    up: Linear
    down: Linear
    gate: Linear | None = None

    def linears(self) -> tuple[Linear, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A matrix for each expert, [num_experts, out_features, in_features]: `y = x @ weight[expert].T + bias[expert]`."""

    weight: TensorName
    num_experts: int
    out_features: int
    in_features: int
    bias: TensorName | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixture of experts: each token goes through few of many feed-forwards.

    scores = softmax(router(x)), over all experts, or sigmoid(router(x)), in float32
    ranks = scores + selection_bias
    chosen = the `experts_per_token` experts with the highest ranks; of equal ranks the lower index
    weights = scores[chosen], divided by their sum if `normalized`, times `scale`, times `expert_scales[chosen]`
    output = sum over the chosen of weights[e] * down[e](activation(gate[e](x)) * up[e](x)),
             or of weights[e] * down[e](activation(up[e](x))) where gate is None,
             + shared(x), times sigmoid(shared_gate(x)) where there is one

    A softmax over the chosen alone is one over all with `normalized`. With `clamped`, as in gpt-oss, the product of
    activation(gate) and up is g * sigmoid(1.702 * g) * (clip(up, -7, 7) + 1) instead, with g = min(gate, 7); there is a
    gate then.

    Attributes:
        selection_bias: float32 [num_experts], which weighs nothing; None is zero.
        num_groups: experts are in so many runs of one length. Where there are several, a token chooses from the
            `groups_per_token` of them whose two highest ranks have the highest sums; of equal sums the earlier one.
        shared: a feed-forward that every token goes through. shared_gate: of one out_feature.
        expert_scales: float32 [num_experts]; None is one.
        norms: where the parts have some of their own, `shared` among them; see `ExpertNorms`.
    """

    router: Linear
    experts_per_token: int
    activation: Activation
    gate: ExpertLinear | None
    up: ExpertLinear
    down: ExpertLinear
    normalized: bool = True
    scale: float = 1.0
    scoring: Scoring = "softmax"
    selection_bias: TensorName | None = None
    num_groups: int = 1
    groups_per_token: int = 1
    shared: FeedForward | None = None
    shared_gate: Linear | None = None
    clamped: bool = False
    expert_scales: TensorName | None = None
    norms: ExpertNorms | None = None

    @property
    def num_experts(self) -> int:
        return self.router.out_features

    def linears(self) -> tuple[Linear, ...]:
        """The matrices that every token is multiplied with."""
        return (*self.scorers(), *(() if self.shared is None else self.shared.linears()))

    def scorers(self) -> tuple[Linear, ...]:
        """The router, and the gate of the shared expert where there is one: few out_features, which weigh outputs."""
        return (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)

    def expert_linears(self) -> tuple[ExpertLinear, ...]:
        """In the order in which they are multiplied."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


Mixer = Attention | SharedAttention | ShortConvolution | GatedDeltaNet
"""The part of a layer that lets tokens see those before them."""

AnyFeedForward = FeedForward | Experts
"""The part of a layer that takes each token by itself."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer:

    x += residual_scale * post_mixer_norm(mixer(input_norm(x)))
    x += residual_scale * post_feedforward_norm(feed_forward(pre_feedforward_norm(x)))

    x += input_gate(x)
    x *= output_scale

    A norm that is None is left out. Where the mixer, the feed-forward, the input gate or the output scale is None, so
    is its line, with its norms.

    Attributes:
        output_scale: [1].
    """

    mixer: Mixer | None
    feed_forward: AnyFeedForward | None
    input_norm: Norm | None = None
    post_mixer_norm: Norm | None = None
    pre_feedforward_norm: Norm | None = None
    post_feedforward_norm: Norm | None = None
    residual_scale: float = 1.0
    input_gate: InputGate | None = None
    output_scale: TensorName | None = None

    def linears(self) -> tuple[Linear, ...]:
        """All matrices that every token is multiplied with, in order."""
        parts = (self.mixer, self.feed_forward)
        linears = tuple(linear for part in parts if part is not None for linear in part.linears())
        return linears if self.input_gate is None else (*linears, self.input_gate.gate, self.input_gate.projection)

    def vectors(self) -> Iterator[TensorName]:
        """Norms, sinks, convolution kernels, the output scale and those of experts, but no biases of matrices."""
        return vectors_of(self)


def vectors_of(part: Any) -> Iterator[TensorName]:
    """The tensors that a dataclass and the parts in it name in fields of type `TensorName`, but those of matrices."""
    if isinstance(part, Linear | ExpertLinear):
        return
    for each in fields(part):
        value = getattr(part, each.name)
        if is_dataclass(value):
            yield from vectors_of(value)
        elif value is not None and each.type in ("TensorName", "TensorName | None"):
            yield value


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep keys and values of the same tokens of a sequence, and so share block tables.

    These are the last `window` tokens; older ones are never read again. None keeps all. A group of a drafter that reads
    its model's has no layers.
    """

    window: int | None
    layers: tuple[int, ...]


class LayerStack:
    """What is said of layers one after another, of a decoder or of an encoder of images."""

    __slots__ = ()
    hidden_size: int
    layers: tuple[Layer, ...]
    tensors: Mapping[TensorName, TensorSource]
    ignored_tensors: frozenset[str]

    def matrices(self) -> tuple[Linear | ExpertLinear, ...]:
        """All matrices in the order in which they are multiplied, those of experts after their router."""
        raise NotImplementedError

    def vectors(self) -> tuple[TensorName, ...]:
        """The vectors of all layers, as `Layer.vectors`, and all other norms, but no biases of matrices."""
        raise NotImplementedError

    def tables(self) -> dict[TensorName, float]:
        """The tensors of which steps read rows, and what multiplies these."""
        raise NotImplementedError

    def attentions(self) -> tuple[tuple[int, Attention], ...]:
        """Layers with attention over keys and values of their own: index and mixer."""
        return tuple((index, mixer) for index, mixer in self.all_attentions() if isinstance(mixer, Attention))

    def all_attentions(self) -> tuple[tuple[int, Attention | SharedAttention], ...]:
        """Layers whose mixer is attention, over whatever keys and values: index and mixer."""
        mixers = ((index, layer.mixer) for index, layer in enumerate(self.layers))
        return tuple((index, mixer) for index, mixer in mixers if isinstance(mixer, Attention | SharedAttention))

    def feed_forwards(self) -> tuple[tuple[int, FeedForward], ...]:
        """Layers with a dense feed-forward: index and feed-forward. Those that experts share are not among them."""
        parts = ((index, layer.feed_forward) for index, layer in enumerate(self.layers))
        return tuple((index, part) for index, part in parts if isinstance(part, FeedForward))

    def mixtures(self) -> tuple[tuple[int, Experts], ...]:
        parts = ((index, layer.feed_forward) for index, layer in enumerate(self.layers))
        return tuple((index, part) for index, part in parts if isinstance(part, Experts))

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups in order of first appearance; layers without keys and values of their own are in none."""
        layers: dict[int | None, list[int]] = {}
        for index, mixer in self.all_attentions():
            layers.setdefault(mixer.window, []).extend([index] if isinstance(mixer, Attention) else [])
        return tuple(CacheGroup(window, tuple(members)) for window, members in layers.items())

    def state_layers(self) -> tuple[int, ...]:
        """Layers that keep a state of fixed size of each sequence, which every token overwrites."""
        stateful = ShortConvolution | GatedDeltaNet
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mixer, stateful))


@dataclass(frozen=True, slots=True)
class ModelSpec(LayerStack):
    """A decoder-only model.

    Attributes:
        context_length: tokens it was made for.
        embedding: [vocab_size, hidden_size]; rows are multiplied by `embedding_scale`. With `AssistantInputs` it is the
            model's, [its vocab_size, state_size].
        head: its weight is `embedding` when tied.
        logit_scale: multiplies logits, before `logit_soft_cap`.
        layer_inputs: of layers with an `input_gate`, all of which have a slice of it; None where no layer has one.
        deepstack: of so many first layers each adds features of images to the stream after it, where a request brings
            them beside an embedding (`Tower.deepstack`).
        next_token: of a drafter whose layers go on from the hidden states of another model; None for a model.
        head_ids: what the head's rows stand for; None where these are the ids from 0 on.
        tensors: canonical name to source, for every tensor that the spec names; loading is strict both ways.
        ignored_tensors: checkpoint names that are known and not needed.
        share: which part of a model it is. All sizes are the part's, but for `vocab_size`.
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
    layer_inputs: LayerInputs | None = None
    next_token: NextTokenInputs | PairedInputs | BlockInputs | AssistantInputs | None = None
    head_ids: tuple[int, ...] | None = None
    deepstack: int = 0
    share: Share = Share()  # noqa: RUF009 - frozen

    def tables(self) -> dict[TensorName, float]:
        own = {} if self.layer_inputs is None else {self.layer_inputs.table: self.layer_inputs.table_scale}
        return {self.embedding: self.embedding_scale, **own}

    @property
    def tied(self) -> bool:
        return self.head.weight == self.embedding

    @property
    def fusion(self) -> Fusion | None:
        """Of a drafter that reads several streams of its model."""
        return self.next_token.fusion if isinstance(self.next_token, PairedInputs | BlockInputs) else None

    @property
    def state_size(self) -> int:
        """Numbers of a hidden state that a drafter reads beside an embedding, which is as wide."""
        own = self.next_token
        return own.of_state.in_features if isinstance(own, AssistantInputs) else self.hidden_size

    @property
    def cuts_embedding(self) -> bool:
        """True if ranks have some rows of the embedding each. What goes on from another model's states has all."""
        return self.share.ranks > 1 and self.next_token is None

    @property
    def first_id(self) -> int:
        """Of the ids whose rows of the head these are, and of a cut embedding; all ranks but the last have as many."""
        return self.share.rank * -(-self.vocab_size // self.share.ranks)

    def matrices(self) -> tuple[Linear | ExpertLinear, ...]:
        found: list[Linear | ExpertLinear] = [*self._first_linears()]
        for layer in self.layers:
            found += layer.linears()
            if isinstance(layer.feed_forward, Experts):
                found += layer.feed_forward.expert_linears()
        return (*found, self.head)

    def linears(self) -> tuple[Linear, ...]:
        """All that every token is multiplied with, layer by layer, and the head."""
        return (*self._first_linears(), *(linear for layer in self.layers for linear in layer.linears()), self.head)

    def _first_linears(self) -> tuple[Linear, ...]:
        """Those outside of the layers and the head."""
        first = () if self.layer_inputs is None else (self.layer_inputs.projection,)
        own = self.next_token
        if isinstance(own, NextTokenInputs | AssistantInputs):
            handed_on = (own.to_state,) if isinstance(own, AssistantInputs) else ()
            return (*first, own.of_token, own.of_state, *handed_on)
        return first if self.fusion is None else (*first, self.fusion.linear)

    def with_own_tensors(self) -> ModelSpec:
        """Without the sources of tensors that it does not name."""
        named: set[TensorName] = {self.embedding, *self.vectors()}
        for matrix in self.matrices():
            named |= {matrix.weight} if matrix.bias is None else {matrix.weight, matrix.bias}
        return replace(self, tensors={name: source for name, source in self.tensors.items() if name in named})

    def vectors(self) -> tuple[TensorName, ...]:
        first = () if self.layer_inputs is None else vectors_of(self.layer_inputs.norm)
        own = () if self.next_token is None else vectors_of(self.next_token)
        return (
            *first,
            *own,
            *(name for layer in self.layers for name in layer.vectors()),
            *vectors_of(self.final_norm),
        )
