"""An input of each layer beside the residual stream, and the branch that takes it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.models.parts import Activation, Linear, Norm
from realizar.models.tensor_source import TensorName


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A further input of each layer, made of a token alone (Gemma 4).

    by_layer(x) = x as [tokens, layers, size]
    inputs = scale * (norm(by_layer(projection(embedded))) + table_scale * by_layer(table[token]))

    `table` is [vocab_size, layers * size], `projection` reads the scaled embedding of a token, `norm` is over `size`.
    """

    size: int
    table: TensorName
    table_scale: float
    projection: Linear
    norm: Norm
    scale: float


@dataclass(frozen=True, slots=True)
class InputGate:
    """The branch that takes a layer's own input: `norm(projection(activation(gate(x)) * inputs[layer]))`."""

    activation: Activation
    gate: Linear
    projection: Linear
    norm: Norm
