"""`Embedding`: the answer of a request for a vector."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.outputs import NO_SNAPSHOTS, SnapshotUse


@dataclass(frozen=True, slots=True)
class Embedding:
    """A pooled hidden state [hidden_size], and what it took."""

    vector: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    snapshots: SnapshotUse = NO_SNAPSHOTS
