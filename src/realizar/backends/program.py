"""A model as blocks, in the order in which a step computes them. Standard library and the spec.

A block is one branch of the residual stream `hidden`, float32 [tokens, hidden_size]:

    hidden += scale * norm(output(part(inputs(norm(hidden)))))

It leaves the stream with `Inputs`, passes its part (attention, a feed-forward, ...), and returns with a `Join`. Each
backend binds these to kernels of its own. Matrices that share an input may always run as one matmul. What
else a backend may fuse, each block chooses where it is built: the activation after its inputs, the addition to the
stream, and the norm that follows. A block that needs the sums of a matmul, to add up those of several devices or an
adapter's, declines by its fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from realizar.errors import InvalidRequestError
from realizar.models.layer_inputs import InputGate, LayerInputs
from realizar.models.mixers import GatedDeltaNet, SharedAttention, ShortConvolution
from realizar.models.parts import AssistantInputs, Fusion, Linear, NextTokenInputs, Norm, PairedInputs, Share
from realizar.models.spec import Attention, Experts, FeedForward, Layer, Mixer, ModelSpec
from realizar.models.tensor_source import TensorName


@dataclass(frozen=True, slots=True)
class Inputs:
    """The beginning of a block: linear(norm(hidden)) for each of `linears`, which may run as one matmul.

    Attributes:
        norm: None takes the stream as it is.
        linears: in the order in which the block's part takes their outputs.
        gated: feed-forward whose gate and up these are: their kernel may apply its activation. None where the outputs
            must be stored as they are.
        pair: what is read in place of the stream, which begins here; None anywhere but in a drafter's first block.
    """

    norm: Norm | None
    linears: tuple[Linear, ...]
    gated: FeedForward | None = None
    pair: PairedInputs | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """The end of a block: hidden += scale * norm(linear(output of the part)).

    The sums of `linear` are whole before `norm`, and nowhere else: this is where devices that share the matrix add up
    theirs, and where an adapter adds its own.

    Attributes:
        linear: None where the part's output is added as it is.
        norm: None adds without one.
        adds_directly: the matmul's epilogue may add to the stream, which needs `linear`, and neither a norm nor an
            `output_scale`. False stores the matmul's sums first; a kernel of its own adds them.
        next: the beginning of the block that reads the stream after it; None where the blocks end.
        folds_next_norm: the root of the next norm, one factor for each token, may be left to the matmul that reads that
            norm, which must be an RMSNorm without bias.
        output_scale: [1], multiplies the whole stream after the addition; None leaves it.
        reduce: ranks have a part of the sums each, which are added up first. Of experts with norms of their own these
            are the sums before `experts_output` and `shared_output`.
    """

    linear: Linear | None
    norm: Norm | None
    scale: float
    adds_directly: bool = False
    next: Inputs | None = None
    folds_next_norm: bool = False
    output_scale: TensorName | None = None
    reduce: bool = False


@dataclass(frozen=True, slots=True)
class _BlockEnds:
    """All blocks have these: the index of their layer, their inputs and their join."""

    layer: int
    inputs: Inputs
    join: Join


@dataclass(frozen=True, slots=True)
class AttentionBlock(_BlockEnds):
    """Norms of queries and keys, rope, attention; values may be the keys' product. An output gate is the last input."""

    attention: Attention

    @property
    def reduces_norms(self) -> bool:
        """True if norms over all heads of a token divide by the mean of the ranks' mean squares."""
        return self.join.reduce and self.attention.qk_norm_axis == "token"

    @property
    def cache_layer(self) -> int:
        return self.layer


@dataclass(frozen=True, slots=True)
class SharedAttentionBlock(_BlockEnds):
    """Queries from the inputs; their norm, rope, attention over the keys and values of an earlier layer."""

    attention: SharedAttention

    @property
    def cache_layer(self) -> int:
        return self.attention.source


@dataclass(frozen=True, slots=True)
class ShortConvolutionBlock(_BlockEnds):
    """Two gates and the values between them from the inputs; the convolution."""

    convolution: ShortConvolution


@dataclass(frozen=True, slots=True)
class GatedDeltaNetBlock(_BlockEnds):
    """Queries, keys, values, gates and decays from the inputs; convolution, recurrence, norm and output gate."""

    recurrence: GatedDeltaNet


@dataclass(frozen=True, slots=True)
class FeedForwardBlock(_BlockEnds):
    """Gate, where there is one, and up from the inputs; the activation, which may be the epilogue of their matmul."""

    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class ExpertsBlock(_BlockEnds):
    """Scores from the inputs; the chosen experts, and a shared one and its gate, read the norm too.

    Where the mixture has norms of its own, the norm of the inputs is the router's alone.
    """

    experts: Experts


@dataclass(frozen=True, slots=True)
class InputGateBlock(_BlockEnds):
    """A gate from the inputs, which have no norm; its activation times the layer's own input."""

    gate: InputGate


Block = (
    AttentionBlock
    | SharedAttentionBlock
    | ShortConvolutionBlock
    | GatedDeltaNetBlock
    | FeedForwardBlock
    | ExpertsBlock
    | InputGateBlock
)


@dataclass(frozen=True, slots=True)
class Tail:
    """logits = head(norm(hidden)), for the tokens whose logits are wanted.

    `to_state` makes what a drafter hands on of the same norm; None where that itself is what is handed on.
    """

    norm: Norm
    head: Linear
    to_state: Linear | None = None

    def matmuls(self) -> list[tuple[Linear, ...]]:
        """Its matrices; those that share an input together."""
        return [(self.head,), *(() if self.to_state is None else ((self.to_state,),))]


@dataclass(frozen=True, slots=True)
class Program:
    """`blocks` run once a step over all tokens, `tail` over the selected ones.

    Attributes:
        layer_inputs: computed before the blocks, from the embedding; None where no block reads any.
        next_token: computed before the blocks, from the embedding and given states; None where these begin with the
            embedding, or with a pair.
        fusion: computed by itself, for other tokens than those of a step; None where there is none.
        share: of a rank among several, whose logits lie one after another.
        sums_embedding: an id's row of the embedding is zeros on all ranks but one, whose sum begins the stream.
        hidden_layers: layers after which the stream is kept.
    """

    blocks: tuple[Block, ...]
    tail: Tail
    layer_inputs: LayerInputs | None = None
    next_token: NextTokenInputs | AssistantInputs | None = None
    share: Share = Share()  # noqa: RUF009 - frozen
    sums_embedding: bool = False
    hidden_layers: tuple[int, ...] = ()
    fusion: Fusion | None = None

    def kept_after(self, num_blocks: int) -> list[int]:
        """Places in `hidden_layers` of those whose stream is that after the first so many blocks."""
        ends = [sum(block.layer <= layer for block in self.blocks) for layer in self.hidden_layers]
        return [place for place, end in enumerate(ends) if end == num_blocks]

    def block_matmuls(self) -> list[tuple[Linear, ...]]:
        """Of all blocks, in order; those that share an input together."""
        first = [] if self.layer_inputs is None else [(self.layer_inputs.projection,)]
        first += [] if self.next_token is None else [(self.next_token.of_token,), (self.next_token.of_state,)]
        first += [] if self.fusion is None else [(self.fusion.linear,)]
        return [*first, *(group for block in self.blocks for group in _matmuls(block))]

    def matmuls(self) -> list[tuple[Linear, ...]]:
        return [*self.block_matmuls(), *self.tail.matmuls()]


def ends_layer(blocks: Sequence[Block], index: int) -> bool:
    """True if the block of an index is the last of its layer."""
    return index + 1 == len(blocks) or blocks[index + 1].layer != blocks[index].layer


def build_program(spec: ModelSpec, hidden_layers: Sequence[int] = ()) -> Program:
    """The blocks of a model, in order; InvalidRequestError where it has no such hidden layer."""
    for layer in hidden_layers:
        if not 0 <= layer < len(spec.layers):
            message = f"hidden_layers names layer {layer}: the model's are 0 to {len(spec.layers) - 1}"
            raise InvalidRequestError(message, "hidden_layers")
    blocks = [block for index, layer in enumerate(spec.layers) for block in _layer_blocks(index, layer, spec.share)]
    if isinstance(spec.next_token, PairedInputs):
        blocks[0] = replace(blocks[0], inputs=replace(blocks[0].inputs, pair=spec.next_token))
    next_token = spec.next_token if isinstance(spec.next_token, NextTokenInputs | AssistantInputs) else None
    to_state = next_token.to_state if isinstance(next_token, AssistantInputs) else None
    tail, kept = Tail(spec.final_norm, spec.head, to_state), tuple(hidden_layers)
    return Program(
        tuple(_linked(blocks)), tail, spec.layer_inputs, next_token, spec.share, spec.cuts_embedding, kept, spec.fusion
    )


def layer_blocks(layers: Sequence[Layer]) -> tuple[Block, ...]:
    """The blocks of layers, of which no other rank has a part."""
    return tuple(
        _linked([block for index, layer in enumerate(layers) for block in _layer_blocks(index, layer, Share())])
    )


def _layer_blocks(index: int, layer: Layer, share: Share) -> list[Block]:
    blocks: list[Block] = []
    if layer.mixer is not None:
        blocks.append(_mixer_block(index, layer, layer.mixer))
    if layer.feed_forward is not None:
        blocks.append(_feed_forward_block(index, layer, layer.feed_forward))
    if share.ranks > 1:
        blocks = [replace(block, join=replace(block.join, reduce=True, adds_directly=False)) for block in blocks]
    if layer.input_gate is not None:
        gate = layer.input_gate
        blocks.append(InputGateBlock(index, Inputs(None, (gate.gate,)), _join(gate.projection, gate.norm, 1.0), gate))
    if blocks and layer.output_scale is not None:
        join = replace(blocks[-1].join, output_scale=layer.output_scale, adds_directly=False)
        blocks[-1] = replace(blocks[-1], join=join)
    return blocks


def _mixer_block(index: int, layer: Layer, mixer: Mixer) -> Block:
    norm, post, scale = layer.input_norm, layer.post_mixer_norm, layer.residual_scale
    if isinstance(mixer, Attention):
        inputs = Inputs(norm, (mixer.q, mixer.k) if mixer.is_k_also_v else mixer.inputs())
        return AttentionBlock(index, inputs, _join(mixer.o, post, scale), mixer)
    if isinstance(mixer, SharedAttention):
        return SharedAttentionBlock(index, Inputs(norm, (mixer.q,)), _join(mixer.o, post, scale), mixer)
    if isinstance(mixer, GatedDeltaNet):
        return GatedDeltaNetBlock(index, Inputs(norm, mixer.inputs()), _join(mixer.out, post, scale), mixer)
    return ShortConvolutionBlock(index, Inputs(norm, (mixer.in_proj,)), _join(mixer.out_proj, post, scale), mixer)


def _feed_forward_block(index: int, layer: Layer, part: FeedForward | Experts) -> Block:
    norm, post, scale = layer.pre_feedforward_norm, layer.post_feedforward_norm, layer.residual_scale
    if isinstance(part, Experts):
        own = norm if part.norms is None else part.norms.router
        return ExpertsBlock(index, Inputs(own, (part.router,)), Join(None, post, scale), part)
    inputs = Inputs(norm, (part.up,)) if part.gate is None else Inputs(norm, (part.gate, part.up), part)
    return FeedForwardBlock(index, inputs, _join(part.down, post, scale), part)


def _linked(blocks: Sequence[Block]) -> list[Block]:
    """Each block's join with what reads the stream next, and the choice to fold the norm of that."""
    following: list[Block | None] = [*blocks[1:], None]
    return [replace(block, join=_before(block.join, after)) for block, after in zip(blocks, following, strict=True)]


def _join(linear: Linear, norm: Norm | None, scale: float) -> Join:
    """The matmul adds to the stream itself where no norm lies between."""
    return Join(linear, norm, scale, adds_directly=norm is None)


def _before(join: Join, block: Block | None) -> Join:
    """A residual add begins the norm that follows, unless the block reads the stream through several norms."""
    following = None if block is None else block.inputs
    has_several = isinstance(block, ExpertsBlock) and block.experts.norms is not None
    norm = None if following is None or has_several else following.norm
    folds = join.norm is None and norm is not None and norm.kind == "rms" and norm.bias is None
    folds = folds and join.output_scale is None
    return replace(join, next=following, folds_next_norm=folds)


def _matmuls(block: Block) -> list[tuple[Linear, ...]]:
    groups = [block.inputs.linears]
    if isinstance(block, ExpertsBlock):
        shared, gate = block.experts.shared, block.experts.shared_gate
        groups += [] if gate is None else [(gate,)]
        groups += [] if shared is None else [shared.linears()[:-1], (shared.down,)]
    return groups if block.join.linear is None else [*groups, (block.join.linear,)]
