"""`Routing`: the arrays through which a mixture's kernels say which token goes to which expert, and where it lies."""

from __future__ import annotations

from collections.abc import Iterable

from realizar.backends.cpu.activation_layout import GROUP, RECORD_BYTES
from realizar.backends.cpu.kernels.linear import BLOCK_TOKENS
from realizar.backends.cpu.kernels.routing import COUNT_FIELDS, COUNT_READ, COUNT_SORTED, ITEM_FIELDS
from realizar.backends.cpu.records import aligned_zeros
from realizar.models.spec import Experts


def num_positions(mixtures: Iterable[Experts], max_tokens: int, block_tokens: int) -> int:
    """Positions that a step's pairs can take at most: each expert's begin a block of records."""
    most = 0
    for experts in mixtures:
        pairs = max_tokens * experts.experts_per_token
        most = max(most, pairs + min(pairs, experts.num_experts) * (block_tokens - 1))
    return -(-most // block_tokens) * block_tokens


def pairs_of_item(in_features: int, block_bytes: int, block_tokens: int) -> int:
    """Pairs of an item: whole blocks of records, few enough to stay in `block_bytes` of cache, at least one block."""
    record_bytes = -(-in_features // GROUP) * RECORD_BYTES
    return max(1, min(BLOCK_TOKENS, block_bytes // record_bytes) // block_tokens) * block_tokens


class Routing:
    """Memory that all mixtures of a model use, one after another.

    Args:
        mixtures: of the model.
        max_tokens: of a step. block_tokens: of a block of records.

    Attributes:
        chosen: int32 [tokens * experts per token], experts. weights: float32, theirs. positions: int32, of the pairs.
        starts: int64 [experts], scratch. items: int64 [items + 1, ITEM_FIELDS]. counts: int64 [COUNT_FIELDS]; see
            `routing` of the kernels.
    """

    def __init__(self, mixtures: Iterable[Experts], max_tokens: int, block_tokens: int) -> None:
        every = list(mixtures)
        pairs = max_tokens * max((each.experts_per_token for each in every), default=0)
        experts = max((each.num_experts for each in every), default=0)
        items = pairs // block_tokens + min(experts, pairs)
        self.chosen, self.positions = aligned_zeros(pairs, "int32"), aligned_zeros(pairs, "int32")
        self.weights = aligned_zeros(pairs, "float32")
        self.starts, self.counts = aligned_zeros(experts, "int64"), aligned_zeros(COUNT_FIELDS, "int64")
        self.items = aligned_zeros((items + 1) * ITEM_FIELDS, "int64")

    def forget_experts_read(self) -> None:
        """Begin the count of experts again."""
        self.counts[[COUNT_READ, COUNT_SORTED]] = 0

    def experts_read(self) -> float | None:
        """Experts that a mixture read in a step, on average since then; None if there was none."""
        read, mixtures = int(self.counts[COUNT_READ]), int(self.counts[COUNT_SORTED])
        return read / mixtures if mixtures else None

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = self.chosen, self.positions, self.weights, self.starts, self.counts, self.items
        return sum(each.nbytes for each in arrays)
