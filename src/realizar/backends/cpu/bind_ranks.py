"""Binds the exchanges between the ranks of a model: sums of rows, logits side by side, and norms over all heads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.attention_record import STEP_SELECTED, STEP_TOKENS
from realizar.backends.cpu.kernels.ranks import (
    ADD_UP,
    PUBLISH,
    SCALE_ROWS,
    SIDE_BY_SIDE,
    SQUARES,
    add_up,
    publish,
    scale_rows,
    side_by_side,
    squares,
)
from realizar.backends.cpu.operations import BoundOperation
from realizar.backends.cpu.records import address
from realizar.backends.cpu.weights.load import Weights
from realizar.backends.cpu.workspace import TOKEN_SQUARES, Workspace
from realizar.backends.parts import RANK_SUMS
from realizar.backends.rank_memory import RankMemory
from realizar.errors import UnsupportedModelError
from realizar.models.parts import Norm
from realizar.models.spec import Attention, ModelSpec


class RankBinder:
    """Of a rank's part; each thread walks all that it binds. `turns` are those of all that the rank exchanges
    (`Workspace`), for whichever model.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, workspace: Workspace, memory: RankMemory, turns: NDArray[np.int64]
    ) -> None:
        self._spec, self._weights, self._workspace, self._memory = spec, weights, workspace, memory
        self._turns = turns

    def add_up(self, name: str, width: int) -> Iterator[BoundOperation]:
        """The first `width` columns of a buffer become the sums of all ranks'."""
        buffer = self._workspace.buffers[name]
        yield from self._publish(name, width, 4 * width)
        record = self._workspace.record(ADD_UP, **buffer.fields("out"), width=width, **self._exchange())
        yield BoundOperation(RANK_SUMS, add_up, record)

    def logits(self) -> Iterator[BoundOperation]:
        """The logits of this rank's ids become those of all."""
        spec, buffer = self._spec, self._workspace.buffers["logits"]
        widest = -(-spec.vocab_size // spec.share.ranks)
        yield from self._publish("logits", spec.head.out_features, 4 * widest, STEP_SELECTED)
        record = self._workspace.record(
            SIDE_BY_SIDE, count_field=STEP_SELECTED, **buffer.fields("out"), width=widest, total=spec.vocab_size,
            **self._exchange(),
        )  # fmt: skip
        yield BoundOperation(RANK_SUMS, side_by_side, record)

    def norm_of_token(self, norm: Norm | None, name: str, width: int) -> Iterator[BoundOperation]:
        """The norm over all ranks' heads of a token, of which `width` columns of a buffer are this one's."""
        if norm is None:
            return
        if norm.kind != "rms" or norm.bias is not None:
            raise UnsupportedModelError(f"{self._spec.architecture}: ranks can't share a norm of kind {norm.kind}")
        values, found = self._workspace.buffers[name], self._workspace.buffers[TOKEN_SQUARES]
        record = self._workspace.record(SQUARES, **values.fields("input"), width=width, **found.fields("out"))
        yield BoundOperation("qk norm", squares, record)
        yield from self.add_up(TOKEN_SQUARES, 1)
        record = self._workspace.record(
            SCALE_ROWS, values=values.at, stride=values.stride, width=width, squares=found.at,
            squares_stride=found.stride, features=width * self._spec.share.ranks, eps=float(norm.eps),
            weight=self._weights.norm_at(norm),
        )  # fmt: skip
        yield BoundOperation("qk norm", scale_rows, record)

    def norms_of_heads(self, attention: Attention) -> Iterator[BoundOperation]:
        """Norms of queries and keys over all heads of a token."""
        size = attention.head_size
        yield from self.norm_of_token(attention.q_norm, "query", attention.num_heads * size)
        yield from self.norm_of_token(attention.k_norm, "key", attention.num_kv_heads * size)

    def _publish(self, name: str, width: int, row_bytes: int, count: int = STEP_TOKENS) -> Iterator[BoundOperation]:
        buffer = self._workspace.buffers[name]
        record = self._workspace.record(
            PUBLISH, count_field=count, **buffer.fields("input"), width=width, row_bytes=row_bytes, **self._exchange()
        )
        yield BoundOperation(RANK_SUMS, publish, record)

    def _exchange(self) -> dict[str, int]:
        memory, share = self._memory, self._spec.share
        return {
            "memory": memory.at, "slots": memory.slots_at, "slot_bytes": memory.slot_bytes, "rank": share.rank,
            "ranks": share.ranks, "turns": address(self._turns),
        }  # fmt: skip
