"""A program's operations bound to kernels and buffers: a list of launches that a step walks, or a graph records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from realizar.backends.cuda.attention.bind import AttentionBinder
from realizar.backends.cuda.kernel_sizes import activation_blocks, whole_row
from realizar.backends.cuda.kernels.activate import activate
from realizar.backends.cuda.kernels.choose import choose, finish_logits
from realizar.backends.cuda.kernels.weights import embed_floats, embed_quantized
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, Form
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.matmul.merging import Merger
from realizar.backends.cuda.matmul.residual import Residual
from realizar.backends.cuda.norms import Branch, Deferred, NormBinder
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.workspace import LOGIT_BLOCK, Workspace
from realizar.backends.parts import part_of
from realizar.backends.program import Activate, Attend, Normalize, Operation, Program, Project, Rotate, Select
from realizar.models.spec import Linear, ModelSpec, Norm

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_EMBED_BLOCK = 1024


class Binder:
    """Binds a model's operations to its weights and workspace."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, workspace: Workspace, attention: AttentionBinder, merger: Merger
    ) -> None:
        self._spec, self._weights, self._space = spec, weights, workspace
        self._attention, self._merger = attention, merger
        self._norms = NormBinder(spec, weights, workspace)
        self._none = torch.zeros(1, device=workspace.hidden.device)

    def bind_body(self, program: Program) -> list[Launch]:
        """Embedding and layers, over all tokens."""
        return [Launch("embed", self._embed()), *self._bind(list(program.body))]

    def bind_tail(self, program: Program) -> list[Launch]:
        """Final norm, logits and the largest of each, over the selected rows; `shape.tokens` counts them."""
        norm = next(op.norm for op in program.tail if isinstance(op, Normalize))
        head = self._merger.merge([program.tail[-1].linear])  # type: ignore[union-attr]
        return [
            Launch("final norm", self._norms.bind_selected(norm, head)),
            Launch("head", self._project(head, selected=True), head.weight_bytes),
            Launch("choose", self._choose(head)),
        ]

    def bind_pool(self, program: Program) -> list[Launch]:
        """Final hidden states of the selected rows, float32, into `pooled`."""
        norm = next(op.norm for op in program.tail if isinstance(op, Normalize))
        return [Launch("final norm", self._norms.bind_selected(norm, None))]

    def _bind(self, operations: list[Operation]) -> Iterator[Launch]:
        branch: Branch | None = None
        linear: MergedLinear | None = None
        rotation: Rotate
        at = 0
        while at < len(operations):
            operation = operations[at]
            at += 1
            if isinstance(operation, Normalize) and operation.source == "hidden":
                part = part_of(operations[at])
                linear, at = self._following(operations, at)
                normalize, deferred = self._norms.bind(branch, operation.norm, linear)
                yield Launch("norm", normalize)
                gated = isinstance(operations[at], Activate)
                reader = self._following(operations, at + 1)[0] if gated else None
                run = self._project(linear, normed=True, deferred=deferred, reader=reader)
                yield Launch(part, run, linear.weight_bytes)
                branch = None
            elif isinstance(operation, Normalize):  # of the whole row of queries or keys
                assert linear is not None
            elif isinstance(operation, Rotate):
                assert linear is not None
                rotation = operation
                yield from self._attention.bind_rotate(operation, linear)
            elif isinstance(operation, Attend):
                assert linear is not None
                made = linear
                linear, _ = self._following(operations, at)
                yield from self._attention.bind_attend(operation, rotation, made, linear)
            elif isinstance(operation, Activate):
                up = linear
                assert up is not None
                linear, _ = self._following(operations, at)
                yield Launch("activation", self._activate(operation, up, linear))
            elif isinstance(operation, Project):
                assert linear is not None
                norm, scale = None, operation.add_scale
                if scale is None:
                    joined = operations[at]
                    assert isinstance(joined, Normalize)
                    norm, scale, at = joined.norm, joined.add_scale, at + 1
                branch = Branch(linear, norm, float(scale or 0.0))
                residual = self._norms.bind_joined(branch, *self._next_norm(operations, at))
                yield Launch(part_of(operation), self._project(linear, residual=residual), linear.weight_bytes)
            else:
                assert isinstance(operation, Select)
        if branch is not None:
            yield Launch("norm", self._norms.bind_last(branch))

    def _next_norm(self, operations: list[Operation], at: int) -> tuple[Norm | None, MergedLinear | None]:
        """The norm of the stream at an operation, and the product that reads it; none where the body ends."""
        if at == len(operations):
            return None, None
        operation = operations[at]
        assert isinstance(operation, Normalize)
        return operation.norm, self._following(operations, at + 1)[0]

    def _following(self, operations: list[Operation], at: int) -> tuple[MergedLinear, int]:
        """The products that start at an operation and share their input, merged, and where they end."""
        linears: list[Linear] = []
        first = operations[at]
        assert isinstance(first, Project)
        while at < len(operations):
            operation = operations[at]
            if not isinstance(operation, Project) or operation.source != first.source:
                break
            linears.append(operation.linear)
            at += 1
        return self._merger.merge(linears), at

    def _embed(self) -> Callable[[StepShape], None]:
        space, table = self._space, self._weights.embedding
        arrays, cols, scale = space.arrays, self._spec.hidden_size, float(self._spec.embedding_scale)
        tokens = arrays["ids"], arrays["token_rows"], space.last
        blocks = -(-cols // _EMBED_BLOCK)

        # Lets the norm start, but does not start early itself: what follows may read a step's arrays before it waits.
        def run(shape: StepShape) -> None:
            grid, dependent = (shape.tokens, blocks), space.launching(shape.tokens)["DEPENDENT"]
            if isinstance(table, torch.Tensor):
                embed_floats[grid](
                    *tokens, space.hidden, cols, scale, table, cols, DEPENDENT=dependent, BLOCK=_EMBED_BLOCK
                )
            else:
                embed_quantized[grid](
                    *tokens, space.hidden, cols, scale, cols=cols, **table.arrays, **table.constants,
                    DEPENDENT=dependent, BLOCK=_EMBED_BLOCK,
                )  # fmt: skip

        return run

    def _project(
        self,
        linear: MergedLinear,
        selected: bool = False,
        normed: bool = False,
        deferred: Deferred | None = None,
        reader: MergedLinear | None = None,
        residual: Callable[[int], Residual] | None = None,
    ) -> Callable[[StepShape], None]:
        """A product.

        Args:
            selected: its input are rows of the tail. normed: of a norm of the stream.
            deferred: what is left to do of that norm.
            reader: what reads the activation of a feed-forward that begins with this product.
            residual: where the product joins the stream, if it does.
        """
        buffers, cols = self._space.activations, linear.cols
        few = self._space.arrays.sizes.selected if selected else None

        def inputs(form: Form) -> ActivationBuffer:
            return buffers.normed(form, cols) if normed else buffers.get(form, cols, few)

        def run(shape: StepShape) -> None:
            rows, norm = shape.tokens, deferred(shape.tokens) if deferred else None
            if reader is not None and linear.is_gated(rows):
                (form,) = reader.forms(rows)
                linear.launch_gated(rows, inputs, buffers.get(form, reader.cols), norm)
            elif residual is not None and linear.joins(rows):
                linear.launch_residual(rows, inputs, residual(rows))
            else:
                partials = self._space.partials(linear.splits(rows), rows, linear.width)
                linear.launch(rows, inputs, partials, norm)

        return run

    def _activate(self, operation: Activate, up: MergedLinear, reader: MergedLinear) -> Callable[[StepShape], None]:
        feed_forward, space = operation.feed_forward, self._space
        width = feed_forward.up.out_features
        gated = feed_forward.gate is not None
        up_at = 64 if up.interleaved else width if gated else 0

        def run(shape: StepShape) -> None:
            if up.is_gated(shape.tokens):  # the product has activated already
                return
            splits = up.splits(shape.tokens)
            partials = space.partials(splits, shape.tokens, up.width)
            for form in reader.forms(shape.tokens):
                target = space.activations.get(form, width)
                cut = whole_row(width) if form.kind == "fp8" else activation_blocks(width, shape.tokens)
                activate[(shape.tokens, cut.blocks)](
                    partials, partials.stride(0), partials.stride(1), self._none if up.bias is None else up.bias,
                    up_at, width, *target.pointers(), *space.row_state, SPLITS=splits,
                    BIAS=up.bias is not None,
                    KIND=_ACTIVATIONS[feed_forward.activation], GATED=gated, INTERLEAVED=up.interleaved,
                    BLOCK=cut.block, num_warps=cut.warps, **target.constants(), **space.launching(shape.tokens),
                )  # fmt: skip

        return run

    def _choose(self, head: MergedLinear) -> Callable[[StepShape], None]:
        space, spec = self._space, self._spec
        blocks = space.block_tops.shape[1]
        padded_blocks = 1 << (blocks - 1).bit_length()

        def run(shape: StepShape) -> None:
            splits = head.splits(shape.tokens)
            partials = space.partials(splits, shape.tokens, head.width)
            finish_logits[(shape.tokens, blocks)](
                partials, partials.stride(0), partials.stride(1), self._none if head.bias is None else head.bias,
                space.logits, spec.vocab_size, float(spec.logit_scale), float(spec.logit_soft_cap or 1.0),
                space.block_tops, space.block_ids, blocks, spec.vocab_size, SPLITS=splits, BIAS=head.bias is not None,
                SOFT_CAP=spec.logit_soft_cap is not None, BLOCK=LOGIT_BLOCK, **space.launching(shape.tokens),
            )  # fmt: skip
            choose[(shape.tokens,)](
                space.block_tops, space.block_ids, blocks, space.choices, space.arrays["selected_rows"], space.last,
                BLOCKS=padded_blocks, **space.launching(shape.tokens),
            )  # fmt: skip

        return run
