"""A program's blocks bound to kernels and buffers: a list of launches that a step walks, or a graph records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from realizar.backends.cuda.attention.bind import AttentionBinder
from realizar.backends.cuda.bind_beside import BesideBinder
from realizar.backends.cuda.bind_experts import Added, ExpertsBinder
from realizar.backends.cuda.inputs.bind import InputsBinder
from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, activation_blocks, whole_width
from realizar.backends.cuda.kernels.activate import activate
from realizar.backends.cuda.kernels.choose import choose, finish_logits
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, InputFormat
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.merging import Merger
from realizar.backends.cuda.norms import Branch, Consumer, Folded, NormBinder, ResidualAdd
from realizar.backends.cuda.recurrences.bind import RecurrenceBinder
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import LOGIT_BLOCK, Workspace
from realizar.backends.parts import block_name, inputs_part, join_part
from realizar.backends.program import (
    AttentionBlock,
    Block,
    ExpertsBlock,
    FeedForwardBlock,
    GatedDeltaNetBlock,
    InputGateBlock,
    Join,
    Program,
    SharedAttentionBlock,
    ShortConvolutionBlock,
    Tail,
)
from realizar.errors import UnsupportedModelError
from realizar.models.spec import FeedForward, ModelSpec

_Bound = (
    AttentionBlock
    | SharedAttentionBlock
    | ShortConvolutionBlock
    | GatedDeltaNetBlock
    | FeedForwardBlock
    | InputGateBlock
)


class Binder:
    """Binds a model's blocks to its weights and workspace."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, workspace: Workspace, attention: AttentionBinder, merger: Merger,
        experts: ExpertsBinder, recurrences: RecurrenceBinder,
    ) -> None:  # fmt: skip
        self._spec, self._weights, self._space, self._experts = spec, weights, workspace, experts
        self._attention, self._merger, self._recurrences = attention, merger, recurrences
        self._norms = NormBinder(spec, weights, workspace)
        self._inputs = InputsBinder(weights, workspace, self._norms)
        self._beside = BesideBinder(self._norms, experts)
        self._mixtures = {experts.router.weight: experts for _, experts in spec.mixtures()}
        self._none = torch.zeros(1, device=workspace.hidden.device)

    def bind_body(self, program: Program) -> list[Launch]:
        """The launches of the embedding and the layers, over all tokens."""
        launches, branch = list(self._begin(program)), None
        for index, block in enumerate(program.blocks):
            first, *others = self._block(block, branch)
            launches += [first, *self._kept(program, index), *others]
            branch = self._branch(block)
        if branch is not None:
            launches.append(Launch("norm", self._norms.bind_last(branch)))
        return [*launches, *self._kept(program, len(program.blocks))]

    def bind_tail(self, tail: Tail) -> list[Launch]:
        """The launches of final norm, logits and choices, over the selected tokens; `kind.tokens` counts them."""
        head = self._merger.merge((tail.head,))
        return [
            Launch("final norm", self._norms.bind_selected(tail.norm, head)),
            Launch("head", self._project(head, selected=True), head.weight_bytes),
            Launch("choose", self._choose(head)),
        ]

    def bind_final_norm(self, tail: Tail) -> list[Launch]:
        """The launches that write final hidden states of the selected tokens, float32, into `final_states`."""
        return [Launch("final norm", self._norms.bind_selected(tail.norm, None))]

    def _begin(self, program: Program) -> Iterator[Launch]:
        """The launches before the blocks: the embedding, and the layers' own inputs where there are some."""
        yield Launch("embed", self._inputs.embed(float(self._spec.embedding_scale)))
        if program.layer_inputs is not None:
            projection = self._merger.merge((program.layer_inputs.projection,))
            yield from self._inputs.bind(program.layer_inputs, projection, self._project(projection, normed=True))

    def _kept(self, program: Program, num_blocks: int) -> list[Launch]:
        """Copies of the stream after so many blocks, once all of it is added up, for layers that are to keep it."""
        return [Launch("hidden state", self._keep(place)) for place in program.kept_after(num_blocks)]

    def _keep(self, place: int) -> Callable[[StepKind], None]:
        kept, hidden = self._space.kept[place], self._space.hidden

        def run(kind: StepKind) -> None:
            kept[: kind.tokens].copy_(hidden[: kind.tokens])

        return run

    def _block(self, block: Block, before: Branch | None) -> Iterator[Launch]:
        """A block's launches; the branch of the block before it is added to the stream by the first of them."""
        if isinstance(block, ExpertsBlock):
            yield from self._mixture(block, before)
            return
        if not isinstance(block, _Bound):
            raise UnsupportedModelError(f"layer {block.layer}: the CUDA backend has no kernels for {block_name(block)}")
        assert block.join.linear is not None
        inputs, output = self._merger.merge(block.inputs.linears), self._merger.merge((block.join.linear,))
        branch = Branch(output, block.join)
        normalize, folded = self._norms.bind(before, block.inputs.norm, inputs)
        yield Launch("norm", normalize)
        consumer = output if isinstance(block, FeedForwardBlock) else None
        run = self._project(inputs, normed=True, folded=folded, consumer=consumer)
        yield Launch(inputs_part(block), run, inputs.weight_bytes)
        if isinstance(block, AttentionBlock | SharedAttentionBlock):
            yield from self._attention.bind(block, inputs, output)
        elif isinstance(block, GatedDeltaNetBlock | ShortConvolutionBlock):
            yield from self._recurrences.bind(block, inputs, output)
        elif isinstance(block, InputGateBlock):
            yield Launch("activation", self._inputs.gate(block, inputs, output))
        else:
            yield Launch("activation", self._activate(block.feed_forward, inputs, output))
        residual = self._norms.bind_residual_add(branch, self._next_consumer(block.join))
        yield Launch(join_part(block), self._project(output, residual=residual), output.weight_bytes)

    def _mixture(self, block: ExpertsBlock, before: Branch | None) -> Iterator[Launch]:
        """The launches of a mixture of experts, whose outputs the norm after it adds to the stream, or down itself."""
        experts, router = block.experts, self._merger.merge(block.inputs.linears)
        score = self._project(router, normed=True)
        if experts.norms is not None:
            yield from self._beside.bind(block, before, router, score)
            return
        consumer = self._experts.input(block.inputs, experts)
        normalize, folded = self._norms.bind(before, block.inputs.norm, consumer)
        yield Launch("norm", normalize)
        output = self._experts.output(experts, block.join)
        residual = self._norms.bind_residual_add(Branch(output, block.join), self._next_consumer(block.join))
        added = Added(output, residual)
        yield from self._experts.bind(experts, block.inputs.norm, consumer, router, score, folded, added)

    def _next_consumer(self, join: Join) -> Consumer | None:
        """The reader of the stream after a residual add; None where the blocks end."""
        if join.next is None:
            return None
        experts = self._mixtures.get(join.next.linears[0].weight)
        return self._merger.merge(join.next.linears) if experts is None else self._experts.input(join.next, experts)

    def _branch(self, block: Block) -> Branch:
        """The branch that a block adds to the stream."""
        if isinstance(block, ExpertsBlock):
            if block.experts.norms is not None:
                return Branch(self._beside.output(block.experts), block.join)
            return Branch(self._experts.output(block.experts, block.join), block.join)
        assert block.join.linear is not None
        return Branch(self._merger.merge((block.join.linear,)), block.join)

    def _project(
        self,
        linear: MergedLinear,
        selected: bool = False,
        normed: bool = False,
        folded: Folded | None = None,
        consumer: MergedLinear | None = None,
        residual: ResidualAdd | None = None,
    ) -> Callable[[StepKind], None]:
        """Return a function that starts a matmul, with the epilogue that it has for a number of tokens.

        Args:
            selected: True if the input is that of the tail, of selected tokens.
            normed: True if it is a norm of the stream.
            folded: the scale of that norm which the matmul must apply.
            consumer: the matmul that reads the activation of a feed-forward which begins with this one.
            residual: operands of the residual-add epilogue, by number of tokens, if the matmul adds to the stream.
        """
        buffers, cols = self._space.activations, linear.cols
        few = self._space.arrays.sizes.selected if selected else None

        def inputs(input_format: InputFormat) -> ActivationBuffer:
            return buffers.normed(input_format, cols) if normed else buffers.get(input_format, cols, few)

        def run(kind: StepKind) -> None:
            tokens, norm = kind.tokens, folded(kind) if folded else None
            if consumer is not None and linear.is_gated(kind):
                (input_format,) = consumer.input_formats(kind)
                linear.launch_gated(kind, inputs, buffers.get(input_format, consumer.cols), norm)
            elif residual is not None and linear.adds_residual(kind):
                linear.launch_residual(kind, inputs, residual(kind))
            else:
                partials = self._space.partials(linear.splits(kind), tokens, linear.width)
                linear.launch(kind, inputs, partials, norm)

        return run

    def _activate(
        self, feed_forward: FeedForward, up: MergedLinear, consumer: MergedLinear
    ) -> Callable[[StepKind], None]:
        space = self._space
        width = feed_forward.up.out_features
        gated = feed_forward.gate is not None
        up_at = 64 if up.interleaved else width if gated else 0

        def run(kind: StepKind) -> None:
            if up.is_gated(kind):  # the matmul has activated already
                return
            splits = up.splits(kind)
            partials = space.partials(splits, kind.tokens, up.width)
            for input_format in consumer.input_formats(kind):
                target = space.activations.get(input_format, width)
                cut = whole_width(width) if input_format.kind == "fp8" else activation_blocks(width, kind.tokens)
                activate[(kind.tokens, cut.blocks)](
                    partials, partials.stride(0), partials.stride(1), self._none if up.bias is None else up.bias,
                    up_at, width, *target.pointers(), *space.token_state, SPLITS=splits,
                    BIAS=up.bias is not None,
                    KIND=ACTIVATIONS[feed_forward.activation], GATED=gated, INTERLEAVED=up.interleaved,
                    BLOCK=cut.block, num_warps=cut.warps, **target.constants(), **space.launching(kind),
                )  # fmt: skip

        return run

    def _choose(self, head: MergedLinear) -> Callable[[StepKind], None]:
        space, spec = self._space, self._spec
        blocks = space.block_tops.shape[1]
        padded_blocks = 1 << (blocks - 1).bit_length()

        def run(kind: StepKind) -> None:
            splits = head.splits(kind)
            partials = space.partials(splits, kind.tokens, head.width)
            finish_logits[(kind.tokens, blocks)](
                partials, partials.stride(0), partials.stride(1), self._none if head.bias is None else head.bias,
                space.logits, spec.vocab_size, float(spec.logit_scale), float(spec.logit_soft_cap or 1.0),
                space.block_tops, space.block_ids, blocks, spec.vocab_size, SPLITS=splits, BIAS=head.bias is not None,
                SOFT_CAP=spec.logit_soft_cap is not None, BLOCK=LOGIT_BLOCK, **space.launching(kind),
            )  # fmt: skip
            choose[(kind.tokens,)](
                space.block_tops, space.block_ids, blocks, space.choices, space.arrays["selected_rows"], space.last,
                BLOCKS=padded_blocks, **space.launching(kind),
            )  # fmt: skip

        return run
