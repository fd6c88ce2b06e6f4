"""Counts of a model's parameters: all of them, and those that a token goes through. Standard library and the spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from realizar.models.spec import LayerStack, ModelSpec
from realizar.models.tensor_source import TensorName


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of a model's tensors; a head that is the embedding counts once.

    `active` is without those of the experts that a token does not go through.
    """

    total: int
    active: int


def count_parameters(spec: ModelSpec) -> ParameterCounts:
    sizes = {name: math.prod(source.shape) for name, source in spec.tensors.items()}
    return ParameterCounts(sum(sizes.values()), size_of_token(spec, sizes))


def size_of_token(spec: LayerStack, sizes: Mapping[TensorName, int]) -> int:
    """The sum of tensors' sizes, in any unit, without those of the experts that a token does not go through."""
    total = sum(sizes.values())
    for _, experts in spec.mixtures():
        for stack in experts.expert_linears():
            total -= sizes[stack.weight] // experts.num_experts * (experts.num_experts - experts.experts_per_token)
    return total
