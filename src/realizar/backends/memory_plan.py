"""A model's planned memory, as a backend computes it from the header. Standard library and the spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from realizar.errors import CapacityError
from realizar.sizes import format_bytes

_SHORTEST_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class ContextPlan:
    """Requests of one length, prompt and output; `num_requests` fit at once, whatever the engine's own limit."""

    context_length: int
    request_bytes: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes.

    Attributes:
        weight_bytes: of all matrices, packed.
        token_weight_bytes: of those matrices that a token reads; None if it reads all.
        embedding_bytes: of the embedding, as stored.
        workspace_bytes: of a step, and of the states of all rows.
        beside_bytes: of weights and workspace of another model, with which this one is loaded. beside_reserved_bytes:
            of these, as of `Beside`. tower_bytes: of weights and workspace of an encoder of images on a GPU.
        reserved_bytes: kept free for sampling, partial sums and graphs. graph_bytes: of that, for graphs.
        kv_bytes_per_token: of a request's first tokens, in all layers.
        kv_limit_bytes: what the KV cache takes, snapshots included; 0 where weights and workspace leave none.
        kv_most_bytes: what it could take if configured so, without leaving too little to others; on a GPU the same.
        free_bytes: memory that was free when asked.
        contexts: powers of two up to the model's context, and that.
        state_bytes: of the state of a row, and what replays its uncertain tokens, which `workspace_bytes` has for all
            rows; 0 without states.
        num_snapshots: of states, for which the KV cache has room beside its blocks. snapshot_bytes: of them all.
        num_host_snapshots: of those that wait in the host's memory. host_snapshot_bytes: of them all, beside the cache.
        of_spans: what each device takes, of a model whose layers several have; then all else is of all of them.
    """

    device: str
    weight_bytes: int
    embedding_bytes: int
    workspace_bytes: int
    kv_dtype: str
    kv_bytes_per_token: float
    kv_limit_bytes: int
    free_bytes: int
    contexts: tuple[ContextPlan, ...]
    token_weight_bytes: int | None = None
    kv_most_bytes: int | None = None
    beside_bytes: int = 0
    beside_reserved_bytes: int = 0
    tower_bytes: int = 0
    reserved_bytes: int = 0
    graph_bytes: int = 0
    state_bytes: int = 0
    num_snapshots: int = 0
    snapshot_bytes: int = 0
    num_host_snapshots: int = 0
    host_snapshot_bytes: int = 0
    of_spans: tuple[MemoryPlan, ...] = ()

    @property
    def needed_bytes(self) -> int:
        """Device memory in bytes before any request; on the CPU the embedding stays in its file."""
        if self.of_spans:
            return sum(each.needed_bytes for each in self.of_spans)
        embedding = self.embedding_bytes if self.device == "cuda" else 0
        return self.weight_bytes + self.workspace_bytes + embedding + self.beside_bytes + self.tower_bytes

    def check_weights_fit(self) -> None:
        """Raise CapacityError, before any weight is read, where weights and workspace alone take more than is free."""
        for each in self.of_spans:
            each.check_weights_fit()
        if self.needed_bytes > self.free_bytes:
            raise CapacityError(
                f"the model does not fit: weights and workspace take {format_bytes(self.needed_bytes)},"
                f" and {format_bytes(self.free_bytes)} are free{self._of_states}"
            )

    def check_one_fits(self) -> None:
        """Raise CapacityError where not even one request of the whole context fits."""
        for each in self.of_spans:
            each.check_one_fits()
        longest = self.contexts[-1]
        fixed = self.needed_bytes + self.reserved_bytes
        left = self.free_bytes - fixed
        if longest.request_bytes > min(left, self.kv_limit_bytes):
            weights, work, request, free = (
                format_bytes(size)
                for size in (
                    self.weight_bytes,
                    fixed - self.weight_bytes,
                    longest.request_bytes,
                    self.free_bytes,
                )
            )
            raise CapacityError(
                f"the model does not fit: {weights} of weights, {work} to work in, and a KV cache of {request} for one"
                f" request of {longest.context_length} tokens, with {free} free; lower the context length"
                f"{self._of_states}"
            )

    @property
    def _of_states(self) -> str:
        """Advice to have fewer states of rows, where there are any: the end of an error's line."""
        if not self.state_bytes:
            return ""
        return f"; each row that may run takes {format_bytes(self.state_bytes)} for its state: lower max_running"


def plan_of_ranks(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """What all ranks of a model take together, each of which plans for a part of what is free."""
    first, ranks = plans[0], len(plans)
    sums: dict[str, Any] = {name: sum(getattr(plan, name) or 0 for plan in plans) for name in _SUMMED}
    contexts = tuple(replace(each, request_bytes=ranks * each.request_bytes) for each in first.contexts)
    return replace(first, **sums, contexts=contexts)


def plan_of_spans(plans: Sequence[MemoryPlan]) -> MemoryPlan:
    """What devices take together, each of which has some of a model's layers."""
    sums: dict[str, Any] = {name: sum(getattr(plan, name) or 0 for plan in plans) for name in _SUMMED}
    lengths = zip(*(plan.contexts for plan in plans), strict=True)
    contexts = tuple(
        ContextPlan(
            each[0].context_length, sum(one.request_bytes for one in each), min(one.num_requests for one in each)
        )
        for each in lengths
    )
    with_states = [plan.num_snapshots for plan in plans if plan.state_bytes]
    return replace(
        plans[-1], **sums, contexts=contexts, num_snapshots=min(with_states, default=0), of_spans=tuple(plans)
    )


_SUMMED = (
    "weight_bytes", "token_weight_bytes", "embedding_bytes", "workspace_bytes", "reserved_bytes", "graph_bytes",
    "kv_bytes_per_token", "kv_limit_bytes", "kv_most_bytes", "free_bytes", "state_bytes", "snapshot_bytes",
    "host_snapshot_bytes", "beside_bytes", "beside_reserved_bytes",
)  # fmt: skip


def planned_lengths(context_length: int) -> list[int]:
    powers = [_SHORTEST_CONTEXT << power for power in range(40) if _SHORTEST_CONTEXT << power < context_length]
    return [*powers, context_length]
