"""`StepKind`, what a step's kernels, epilogues and graph are chosen by; `Launch`, one operation of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention


@dataclass(frozen=True, slots=True)
class StepKind:
    """All that decides which kernels a step runs, and on which grids: steps of one kind have one graph.

    Matmuls and norms ask `MergedLinear`, `ExpertsInput` and `ExpertsOutput` for formats, splits and epilogues of a
    kind: whatever else comes to decide is a field here, and is asked for there.

    Attributes:
        tokens: padded.
        decodes: rows of one token that go through `attend_decode`, padded.
        tiles: of attention of chunks, padded where the step has a graph; 0 for a step of decodes alone.
        long: whether few decodes have long contexts, which other kernels suit than short ones.
        embeds: embeddings are given for some tokens: they are copied first, beside the graph of the kind that is else
            the same, whose kernels leave their places alone.
        whole: whether tokens of images see each other, in the layers that have that: launched one by one.
    """

    tokens: int
    decodes: int = 0
    tiles: int = 0
    long: bool = False
    embeds: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """`run` starts the operation's kernels; `name` is what a profile calls it.

    Attributes:
        weight_bytes: of the matrices that it reads.
        share_of_token: of those bytes, that one token reads at most: of the matrices of experts.
        attention: of the layer whose cache it reads; None for what reads none.
    """

    name: str
    run: Callable[[StepKind], None]
    weight_bytes: int = 0
    share_of_token: float = 1.0
    attention: Attention | SharedAttention | None = None


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """A launch of one step: `start` starts it. `bytes_read` counts the weights and the KV cache that it reads."""

    name: str
    start: Callable[[], None]
    bytes_read: int
