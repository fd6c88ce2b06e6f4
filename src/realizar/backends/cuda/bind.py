"""A program's blocks bound to kernels and buffers: a list of launches that a step walks, or a graph records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from realizar.backends.cuda.attention.bind import AttentionBinder
from realizar.backends.cuda.bind_dense import DenseBinder
from realizar.backends.cuda.bind_mixture import MixtureBinder
from realizar.backends.cuda.inputs.bind import InputsBinder
from realizar.backends.cuda.kernels.choose import choose, finish_logits
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.linears import MergedLinear, Merger
from realizar.backends.cuda.norms import Branch, Consumer, NormBinder
from realizar.backends.cuda.ranks.peers import Sums
from realizar.backends.cuda.ranks.sums import RankSums
from realizar.backends.cuda.recurrences.bind import RecurrenceBinder
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import LOGIT_BLOCK, Workspace
from realizar.backends.parts import RANK_SUMS, inputs_part, join_part
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
    ends_layer,
)
from realizar.models.parts import AssistantInputs, Fusion, NextTokenInputs, Norm
from realizar.models.spec import ModelSpec


class Binder:
    def __init__(
        self, spec: ModelSpec, weights: Weights, workspace: Workspace, attention: AttentionBinder, merger: Merger,
        experts: MixtureBinder, recurrences: RecurrenceBinder, norms: NormBinder, dense: DenseBinder,
        ranks: RankSums | None = None,
    ) -> None:  # fmt: skip
        self._ranks, self._turns = ranks, dict[Block, int]()
        self._spec, self._space, self._experts, self._norms, self._dense = spec, workspace, experts, norms, dense
        self._attention, self._merger, self._recurrences = attention, merger, recurrences
        self._inputs = InputsBinder(weights, workspace, norms)
        self._selected = partial(workspace.activations.get, tokens=workspace.arrays.sizes.selected)
        self._mixtures = {experts.router.weight: experts for _, experts in spec.mixtures()}
        self._none = torch.zeros(1, device=workspace.hidden.device)

    def bind_body(self, program: Program) -> list[Launch]:
        """The launches of the embedding and the layers, over all tokens."""
        summed = [block for block in program.blocks if block.join.reduce]
        self._turns = {block: turn for turn, block in enumerate(summed)}
        launches, branch = list(self._begin(program)), self._of_state(program)
        for index, block in enumerate(program.blocks):
            first, *others, last = self._block(block, branch)
            launches += [first, *self._kept(program, index), *others, *self._features(program, index), last]
            branch = self._branch(block)
        if branch is not None:
            launches.append(Launch("norm", self._norms.bind_last(branch)))
        return [*launches, *self._kept(program, len(program.blocks))]

    def bind_tail(self, tail: Tail, *, gives_states: bool = False) -> list[Launch]:
        """Launches of final norm, logits and the largest ones, over the selected tokens; `kind.tokens` counts them.

        With `gives_states` those of `bind_final_norm` are among them.
        """
        head = self._merger.merge((tail.head,))
        return [
            *(self.bind_final_norm(tail) if gives_states else ()),
            Launch("final norm", self._norms.bind_selected(tail.norm, head)),
            Launch("head", self._dense.project(head, self._selected), head.weight_bytes),
            Launch("choose", self._choose(head)),
        ]

    def bind_final_norm(self, tail: Tail) -> list[Launch]:
        """The launches that write final hidden states of the selected tokens, or what is made of these to be handed on,
        float32, into `final_states`.
        """
        if tail.to_state is None:
            return [Launch("final norm", self._norms.bind_selected(tail.norm, None))]
        linear = self._merger.merge((tail.to_state,))
        return [
            Launch("final norm", self._norms.bind_selected(tail.norm, linear)),
            Launch("next-token inputs", self._dense.project(linear, self._selected), linear.weight_bytes),
            Launch("next-token inputs", partial(self._hand_on, linear)),
        ]

    def _hand_on(self, linear: MergedLinear, kind: StepKind) -> None:
        sums = self._space.partials(linear.splits(kind), kind.tokens, linear.width)
        torch.sum(sums, dim=0, out=self._space.final_states[: kind.tokens])

    def _begin(self, program: Program) -> Iterator[Launch]:
        yield Launch("embed", self._inputs.embed(self._spec))
        if self._ranks is not None:
            yield Launch(RANK_SUMS, self._add_up_stream)
        if program.layer_inputs is not None:
            projection = self._merger.merge((program.layer_inputs.projection,))
            project = self._dense.project(projection, self._space.activations.normed)
            yield from self._inputs.bind(program.layer_inputs, projection, project)

        if program.next_token is not None:
            yield from self._next_token_inputs(program.next_token)
        pair = program.blocks[0].inputs.pair
        if pair is not None:
            yield from (Launch("paired inputs", run) for run in self._norms.bind_pair(pair))

    def _add_up_stream(self, kind: StepKind) -> None:
        assert self._ranks is not None
        self._ranks.of_stream(self._space.hidden[: kind.tokens], self._space.launching(kind))

    def bind_fusion(self, fusion: Fusion) -> list[Launch]:
        """Launches that make states of `Workspace.streams`, which are not a step's, and leave them in `hidden`."""
        linear = self._merger.merge((fusion.linear,))
        launches = [
            Launch("fusion", self._norms.bind_apart(self._space.streams, fusion.norm, linear)),
            Launch("fusion", self._dense.project(linear, self._space.activations.normed), linear.weight_bytes),
            Launch("fusion", self._clear),
            Launch("fusion", self._norms.bind_last(Branch(linear, Join(fusion.linear, None, 1.0)))),
        ]
        after = fusion.output_norm
        return launches if after is None else [*launches, Launch("fusion", self._norms.bind_in_place(after))]

    def bind_injection(self, program: Program) -> list[Launch]:
        """Launches that write the keys and values of `Workspace.states`, in every layer; queries are lost."""
        launches = []
        for block in program.blocks:
            if isinstance(block, AttentionBlock):
                linear = self._merger.merge(block.inputs.linears)
                project = self._dense.project(linear, self._space.activations.normed)
                launches += [
                    Launch("injection", self._norms.bind_apart(self._space.states, None, linear)),
                    Launch("injection", project, linear.weight_bytes),
                    self._attention.bind_keys(block, linear),
                ]
        return launches

    def _next_token_inputs(self, inputs: NextTokenInputs | AssistantInputs) -> Iterator[Launch]:
        """The stream becomes the token's part, from its embedding; the state's is added by the first block's norm."""
        part, space = "next-token inputs", self._space
        norms: tuple[Norm | None, Norm | None] = None, None
        if isinstance(inputs, NextTokenInputs):
            norms = inputs.token_norm, inputs.state_norm
        of_token, of_state = (self._merger.merge((linear,)) for linear in (inputs.of_token, inputs.of_state))
        normed = space.activations.normed
        yield Launch(part, self._norms.bind_apart(space.embedded, norms[0], of_token))
        yield Launch(part, self._dense.project(of_token, normed), of_token.weight_bytes)
        yield Launch(part, self._clear)
        yield Launch(part, self._norms.bind_last(Branch(of_token, Join(inputs.of_token, None, 1.0))))
        yield Launch(part, self._norms.bind_apart(space.states, norms[1], of_state))
        yield Launch(part, self._dense.project(of_state, normed), of_state.weight_bytes)

    def _clear(self, kind: StepKind) -> None:
        self._space.hidden[: kind.tokens].zero_()

    def _of_state(self, program: Program) -> Branch | None:
        if program.next_token is None:
            return None
        linear = program.next_token.of_state
        return Branch(self._merger.merge((linear,)), Join(linear, None, 1.0))

    def _kept(self, program: Program, num_blocks: int) -> list[Launch]:
        """Copies of the stream after so many blocks, once all of it is added up, for layers that are to keep it."""
        return [Launch("hidden state", partial(self._keep, place)) for place in program.kept_after(num_blocks)]

    def _keep(self, place: int, kind: StepKind) -> None:
        self._space.kept[place, : kind.tokens].copy_(self._space.hidden[: kind.tokens])

    def _features(self, program: Program, index: int) -> list[Launch]:
        """Adds what images bring for a layer, before the launch that may add the last block's output to the stream and
        begin the norm after it. None of such layers reads the stream later.
        """
        block = program.blocks[index]
        if block.layer >= self._spec.deepstack or not ends_layer(program.blocks, index):
            return []
        return [Launch("features of images", partial(self._space.add_features, block.layer))]

    def _block(self, block: Block, before: Branch | None) -> Iterator[Launch]:
        """A block's launches; the branch of the block before it is added to the stream by the first of them."""
        if isinstance(block, ExpertsBlock):
            yield from self._experts.bind(block, before, self._next_consumer(block.join))
            return
        assert block.join.linear is not None
        inputs, output = self._merger.merge(block.inputs.linears), self._merger.merge((block.join.linear,))
        buffers = self._space.activations
        branch = Branch(output, block.join)
        if block.inputs.pair is None:
            normalize, folded = self._norms.bind(before, block.inputs.norm, inputs)
        else:
            normalize, folded = self._norms.bind_apart(self._space.pair, None, inputs), None
        yield Launch("norm", normalize)
        consumer = output if isinstance(block, FeedForwardBlock) else None
        run = self._dense.project(inputs, buffers.normed, folded=folded, consumer=consumer, target=buffers.get)
        yield Launch(inputs_part(block), run, inputs.weight_bytes)
        if isinstance(block, AttentionBlock | SharedAttentionBlock):
            yield from self._attention.bind(block, inputs, output)
        elif isinstance(block, GatedDeltaNetBlock | ShortConvolutionBlock):
            yield from self._recurrences.bind(block, inputs, output)
        elif isinstance(block, InputGateBlock):
            yield Launch("activation", self._inputs.gate(block, inputs, output))
        else:
            yield Launch("activation", self._dense.activate(block.feed_forward, inputs, output, buffers.get))
        residual = self._norms.bind_residual_add(branch, self._next_consumer(block.join))
        yield Launch(join_part(block), self._dense.project(output, buffers.get, residual=residual), output.weight_bytes)

    def _next_consumer(self, join: Join) -> Consumer | None:
        if join.next is None:
            return None
        experts = self._mixtures.get(join.next.linears[0].weight)
        return self._merger.merge(join.next.linears) if experts is None else self._experts.input(join.next, experts)

    def _branch(self, block: Block) -> Branch:
        turn = self._turns.get(block, 0)
        if isinstance(block, ExpertsBlock):
            return replace(self._experts.branch(block), turn=turn)
        assert block.join.linear is not None
        return Branch(self._merger.merge((block.join.linear,)), block.join, turn)

    def _choose(self, head: MergedLinear) -> Callable[[StepKind], None]:
        space, spec = self._space, self._spec
        blocks = space.block_tops.shape[1]
        padded_blocks = 1 << (blocks - 1).bit_length()

        def run(kind: StepKind) -> None:
            splits = head.splits(kind)
            sums = Sums(space.partials(splits, kind.tokens, head.width), splits, head.bias)
            if self._ranks is not None:
                sums = self._ranks.of_logits(sums, space.launching(kind))
            finish_logits[(kind.tokens, blocks)](
                sums.partials, *sums.partials.stride()[:2], self._none if sums.bias is None else sums.bias,
                space.logits, spec.vocab_size, float(spec.logit_scale), float(spec.logit_soft_cap or 1.0),
                space.block_tops, space.block_ids, blocks, spec.vocab_size, SPLITS=sums.splits,
                BIAS=sums.bias is not None, SOFT_CAP=spec.logit_soft_cap is not None, BLOCK=LOGIT_BLOCK, **sums.shared,
                **space.launching(kind),
            )  # fmt: skip
            choose[(kind.tokens,)](
                space.block_tops, space.block_ids, blocks, space.sampled, space.arrays["selected_rows"], space.last,
                self._none if space.head_ids is None else space.head_ids, BLOCKS=padded_blocks,
                NAMED=space.head_ids is not None, **space.launching(kind),
            )  # fmt: skip

        return run
