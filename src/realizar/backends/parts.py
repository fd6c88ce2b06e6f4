"""Parts of a layer, by the names that profiles give them on every backend. Standard library and the spec."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.base import ForwardInput
from realizar.backends.program import Activate, Attend, Normalize, Operation, Project, Rotate
from realizar.models.spec import Attention

_PRODUCTS = {"query": "qkv", "key": "qkv", "value": "qkv", "gate": "gate and up", "up": "gate and up", "logits": "head"}
_NORMS = {"query": "row norm", "key": "row norm", "selected": "final norm"}


@dataclass(frozen=True, slots=True)
class PartTime:
    """One operation of a step, run alone.

    Attributes:
        part: what it does; operations of one part share the name.
        seconds: the best of several.
        bytes_read: of weights and KV cache that it must read from memory; 0 where it reads neither.
    """

    part: str
    seconds: float
    bytes_read: int = 0


def part_of(operation: Operation) -> str:
    """The name of the part that an operation belongs to."""
    if isinstance(operation, Project):
        if operation.source in ("attended", "activated"):
            return "output" if operation.source == "attended" else "down"
        return _PRODUCTS[operation.target]
    if isinstance(operation, Normalize):
        return _NORMS.get(operation.source, "norm")
    if isinstance(operation, Rotate):
        return "rope"
    if isinstance(operation, Attend):
        return "attention"
    return "activation" if isinstance(operation, Activate) else "select"


def cached_tokens_read(attention: Attention, step: ForwardInput) -> int:
    """Tokens whose keys and values a layer's attention reads at least once, over all rows of a step."""
    total = 0
    for row in step.rows:
        seen = row.num_computed_tokens + row.num_tokens
        if attention.window is not None:
            seen = min(seen, attention.window + row.num_tokens - 1)
        total += seen if row.num_tokens else 0
    return total
