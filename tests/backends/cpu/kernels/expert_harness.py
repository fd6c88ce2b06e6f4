"""A mixture's kernels from chosen experts on, run by hand, thread after thread; and its twin in plain numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.cpu.kernels.linear_harness import lanes_of
from realizar.backends.cpu.bind_experts import ExpertsBinder
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernel_library import KernelLibrary
from realizar.backends.cpu.kernels.normalize import NO_NORM, NORMALIZE, normalize
from realizar.backends.cpu.operations import BoundOperation, BoundProgram
from realizar.backends.cpu.records import address
from realizar.backends.cpu.threads import ThreadTeam
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.workspace import Workspace, written_records
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.models.spec import Experts, ModelSpec
from resolving import resolved

Array = NDArray[np.float32]
MAX_TOKENS = 256


@dataclass
class Mixture:
    """The experts of layer 0 of a model, bound to memory of their own."""

    experts: Experts
    weights: Weights
    workspace: Workspace
    operations: list[BoundOperation]

    @classmethod
    def load(
        cls, spec: ModelSpec, checkpoint: Checkpoint, instruction_set: str | None = None,
        block_bytes: int = 384 * 1024,
    ) -> Mixture:  # fmt: skip
        """Pack the experts' matrices; `block_bytes` of the cache may be taken by an item's activations."""
        part = spec.layers[0].feed_forward
        assert isinstance(part, Experts)
        instructions = select(instruction_set)
        config = EngineConfig(threads=2, max_step_tokens=MAX_TOKENS, max_running=1, context_length=512)
        space = Workspace(spec, resolved(spec, checkpoint, config, "cpu"), instructions.tile_tokens[0])
        weights = Weights(spec, checkpoint, lanes_of(instructions.name), 2)
        weights.load(part.expert_linears(), lambda _: None)
        kernels = KernelLibrary(instructions)
        binder = ExpertsBinder(instructions, kernels, weights, space, block_bytes)
        return cls(part, weights, space, [_input(space), *binder.bind(part, None)])

    def run(self, x: Array, chosen: NDArray[np.int32], weights: Array, threads: int = 1) -> Array:
        """The buffer that the sum goes to, float32 [tokens, hidden], for tokens [tokens, hidden]."""
        space, (tokens, hidden) = self.workspace, x.shape
        for buffer in ("routed", "expert gate", "expert up", "expert activated", "branch"):
            space.buffers[buffer].values[:] = np.nan  # what was there before must not be read
        space.buffers["normed"].values[:tokens, :hidden] = x
        space.step[0] = tokens
        space.routing.chosen[: chosen.size] = chosen.ravel()
        space.routing.weights[: weights.size] = weights.ravel()
        unchosen = [each for each in self.operations if each.kernel != self.operations[1].kernel]
        bound, team = BoundProgram(unchosen), ThreadTeam(threads)
        team.run(bound.at, bound.count)
        team.close()
        return space.buffers["branch"].values[:tokens, :hidden].copy()


def _input(space: Workspace) -> BoundOperation:
    """Records of the buffer `normed`, as a norm makes them."""
    normed, hidden = space.buffers["normed"], space.buffers["hidden"]
    record = NORMALIZE.pack({
        "step": address(space.step), "count_field": 0, "input": normed.at, "input_stride": normed.stride,
        "width": normed.values.shape[1] - 16, "kind": NO_NORM, "eps": 0.0, "weight": 0, "bias": 0, "out": normed.at,
        "out_stride": normed.stride, **written_records(normed.records), "residual": 0,
        "residual_stride": hidden.stride, "residual_scale": 0.0, "terms": 0,
    })  # fmt: skip
    return BoundOperation("norm", normalize, record)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def expected(stacks: tuple[Any, Any, Any], x: Any, chosen: Any, weights: Any) -> Any:
    """The mixture in the type of its arguments: one pair after the other. Stacks are [experts, out, in]."""
    gate, up, down = stacks
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            out[token] += weight * (down[expert] @ (silu(gate[expert] @ row) * (up[expert] @ row)))
    return out
