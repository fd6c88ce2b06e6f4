"""The embedding of a step's tokens, the layers' own inputs and the gates that take them, bound to kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from realizar.backends.cuda.attention.output_gate import start_gate
from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, whole_width
from realizar.backends.cuda.kernels.embed import embed_floats, embed_quantized
from realizar.backends.cuda.kernels.normalize import add_norm
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.cuda.matmul.linears import MergedLinear
from realizar.backends.cuda.norms import NORM_KINDS, NormBinder, Run
from realizar.backends.cuda.weights.load import Weights
from realizar.backends.cuda.weights.plain import PlainMatrix
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.program import InputGateBlock
from realizar.models.layer_inputs import LayerInputs
from realizar.models.spec import ModelSpec

_EMBED_BLOCK = 1024
_PART = "layer inputs"


@dataclass(frozen=True, slots=True)
class InputsBinder:
    """Binds what comes before the blocks, and the gates of layers' own inputs; the embedding begins the norms."""

    weights: Weights
    space: Workspace
    norms: NormBinder

    def embed(self, spec: ModelSpec) -> Run:
        """embedded = scale * rows of the embedding, but for given embeddings, which are there; zeros where another rank
        has the row.
        """
        share, ids = spec.share, (spec.first_id, spec.head.out_features)
        part = 0 if share.ranks == 1 else 1 if share.rank == 0 else 2
        scale = float(spec.embedding_scale)
        return self._embed(self.weights.embedding, self.space.embedded, scale, given=True, part=part, ids=ids)

    def bind(self, inputs: LayerInputs, projection: MergedLinear, project: Run) -> Iterator[Launch]:
        """What makes the inputs of all layers from the embedding in `hidden`; `project` starts the `projection`."""
        table, scale = self.weights.layer_table, float(inputs.scale * inputs.table_scale)
        assert table is not None
        yield Launch(_PART, self._embed(table, self.space.layer_inputs, scale, given=False))
        yield Launch(_PART, self.norms.bind(None, None, projection)[0])
        yield Launch(_PART, project, projection.weight_bytes)
        yield Launch(_PART, self._add(inputs, projection))

    def gate(self, block: InputGateBlock, linear: MergedLinear, consumer: MergedLinear) -> Run:
        """The input of `consumer`: the activation of what `linear` makes, times the layer's own input."""
        size, activation = consumer.cols, ACTIVATIONS[block.gate.activation]
        own = self.space.layer_inputs[:, block.layer * size :]
        return lambda kind: start_gate(self.space, kind, linear, 0, size, consumer, source=own, activation=activation)

    def _embed(
        self, table: PlainMatrix | torch.Tensor, out: torch.Tensor, scale: float, *, given: bool, part: int = 0,
        ids: tuple[int, int] = (0, 0),
    ) -> Run:  # fmt: skip
        """out [tokens, cols] = scale * rows of a table; out is contiguous; `given` embeddings keep their places.

        Of a `part` of a table `ids` are its first row and how many it has (`kernels.embed`).
        """
        space, cols = self.space, out.shape[1]
        tokens = space.arrays["ids"], space.arrays["token_rows"], space.last
        blocks, fixed = -(-cols // _EMBED_BLOCK), {"GIVEN": given, "BLOCK": _EMBED_BLOCK, "PART": part}

        # Lets the next kernel start, but does not start early itself: that may read a step's arrays before it waits.
        def run(kind: StepKind) -> None:
            grid = kind.tokens, blocks
            constants = {**fixed, "DEPENDENT": space.launching(kind)["DEPENDENT"]}
            if isinstance(table, torch.Tensor):
                embed_floats[grid](*tokens, out, cols, scale, table, cols, *ids, **constants)
            else:
                embed_quantized[grid](
                    *tokens, out, cols, scale, cols=cols, first=ids[0], count=ids[1], **table.arrays,
                    **table.constants, **constants,
                )  # fmt: skip

        return run

    def _add(self, inputs: LayerInputs, projection: MergedLinear) -> Run:
        """Add the norm of each layer's slice of the projection, times the scale of inputs, which its weights take."""
        space, size = self.space, inputs.size
        layers, cut = projection.width // size, whole_width(size)
        norm = replace(inputs.norm, weight_scale=inputs.norm.weight_scale * inputs.scale)
        weight = self.weights.norm_weight(norm)
        assert projection.bias is None
        assert norm.bias is None

        def run(kind: StepKind) -> None:
            splits, slices = projection.splits(kind), kind.tokens * layers
            add_norm[(slices,)](
                space.partials(splits, slices, size), slices * size, size, weight, float(norm.eps),
                space.layer_inputs, size, SPLITS=splits, NORM=NORM_KINDS[norm.kind], BLOCK=cut.block,
                num_warps=cut.warps, **space.launching(kind),
            )  # fmt: skip

        return run
