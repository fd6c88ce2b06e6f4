"""Choices of experts of our engines, read between a step's operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backend_runs import BackendRunner
from fidelity.given_routes import Routes

_CHOICE = "choice of experts"


@dataclass
class Notes:
    """What mixtures chose in the steps so far, and by which logits: one entry after the other, step by step.

    Attributes:
        mixtures: of the model.
    """

    mixtures: int
    chosen: list[NDArray[np.int64]] = field(default_factory=list)
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def next(self) -> int:
        """The number of the mixture that chooses next."""
        return len(self.chosen) % self.mixtures

    def read(self) -> Routes:
        """The choices of all steps, mixture by mixture."""
        return Routes(
            [np.concatenate(self.chosen[i :: self.mixtures]) for i in range(self.mixtures)],
            [np.concatenate(self.logits[i :: self.mixtures]) for i in range(self.mixtures)],
        )


@contextmanager
def watch(runner: BackendRunner[Any]) -> Iterator[Notes]:
    """A context in which the choices of a runner's steps are noted; a GPU's runner has no graphs."""
    notes = Notes(len(runner.spec.mixtures()))
    with (_watch_cpu if hasattr(runner.backend, "walk") else _watch_cuda)(runner, notes):
        yield notes


@contextmanager
def _watch_cpu(runner: BackendRunner[Any], notes: Notes) -> Iterator[None]:
    """Operations are walked one by one; the first of a mixture's choice chooses."""
    from realizar.backends.cpu.kernels.attention_record import STEP_TOKENS
    from realizar.backends.cpu.operations import BoundProgram

    backend, walk, mixtures = runner.backend, runner.backend.walk, runner.spec.mixtures()

    def walk_and_note(program: Any) -> None:
        before = ""
        for operation in program.operations:
            space = backend.model.workspace
            chooses, tokens = operation.part == _CHOICE != before, int(space.step[STEP_TOKENS])
            if chooses:
                part = mixtures[notes.next][1]
                notes.logits.append(space.buffers["scores"].values[:tokens, : part.num_experts].copy())
            walk(BoundProgram([operation]))
            if chooses:
                chosen = space.routing.chosen[: tokens * part.experts_per_token].reshape(tokens, -1)
                notes.chosen.append(chosen.astype(np.int64))
            before = operation.part

    backend.walk = walk_and_note
    try:
        yield
    finally:
        backend.walk = walk


@contextmanager
def _watch_cuda(runner: BackendRunner[Any], notes: Notes) -> Iterator[None]:
    """What lies on the device after the launch that chooses; tokens of padding have chosen no expert."""
    from realizar.backends.cuda.matmul.routing import MANY_TOKENS, ROUTED_TOKENS

    model, mixtures = runner.backend.model, runner.spec.mixtures()
    graphs, space, body = model.graphs, model.space, model.graphs._body
    biases = [
        None if part.router.bias is None else model.weights.vector_values(part.router.bias) for _, part in mixtures
    ]
    # The kernels that choose by themselves add biases to the scores that they keep.
    has_kernel = graphs._device.runs("matmuls") and not runner.config.batch_invariant
    most = (MANY_TOKENS if graphs._device.has_dependent_launch else ROUTED_TOKENS) if has_kernel else 0

    def noting(launch: Any) -> Any:
        def run(shape: Any) -> None:
            launch.run(shape)
            bias, (_, part), tokens = biases[notes.next], mixtures[notes.next], shape.tokens
            places = model.weights.experts[part.up.weight].per_token  # the last may be the shared expert's
            chosen = space.chosen[: tokens * places].cpu().numpy().reshape(tokens, -1)[:, : part.experts_per_token]
            logits = space.partial_sums[: tokens * part.num_experts].cpu().numpy().reshape(tokens, -1)
            live = chosen[:, 0] >= 0
            notes.chosen.append(chosen[live].astype(np.int64))
            notes.logits.append(logits[live] if bias is None or tokens <= most else logits[live] + bias)

        return replace(launch, run=run)

    graphs._body = [noting(launch) if launch.name == _CHOICE else launch for launch in body]
    try:
        yield
    finally:
        graphs._body = body
