"""`ModelSpec` to a flat list of operations over named buffers: what a step does, without saying how. Standard library.

A backend walks the list at load, fuses neighbours by its own table and binds each operation to a kernel and addresses.
Buffers hold one row per token, float32 unless the backend knows better:

    hidden                                   the residual stream [hidden_size]
    normed                                   input of a product [hidden_size]
    query, key, value, attended              heads side by side
    gate, up, activated                      [feed-forward size]
    branch                                   output of a product that a norm follows [hidden_size]
    selected, logits                         rows of the last part: tokens whose logits are wanted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.models.spec import Attention, FeedForward, Linear, ModelSpec, Norm

Buffer = Literal[
    "hidden", "normed", "query", "key", "value", "attended", "gate", "up", "activated", "branch", "selected", "logits"
]


@dataclass(frozen=True, slots=True)
class Normalize:
    """target = norm(source); a None norm copies. `add_scale` not None: hidden += add_scale * target."""

    source: Buffer
    target: Buffer
    norm: Norm | None
    add_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Project:
    """target = linear(source), or target += add_scale * linear(source)."""

    linear: Linear
    source: Buffer
    target: Buffer
    add_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Rotate:
    """QK norm per head and rope on query and key; key and value go into the cache of `layer`."""

    layer: int
    attention: Attention


@dataclass(frozen=True, slots=True)
class Attend:
    """attended = attention of query with the cache of `layer`."""

    layer: int
    attention: Attention


@dataclass(frozen=True, slots=True)
class Activate:
    """activated = activation(gate) * up, or activation(up)."""

    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class Select:
    """selected = those rows of hidden whose logits are wanted."""


Operation = Normalize | Project | Rotate | Attend | Activate | Select


@dataclass(frozen=True, slots=True)
class Program:
    """`body` runs once a step over all tokens, `tail` over the selected rows."""

    body: tuple[Operation, ...]
    tail: tuple[Operation, ...]


def build_program(spec: ModelSpec) -> Program:
    """The operations of a model, in order."""
    body: list[Operation] = []
    for index, layer in enumerate(spec.layers):
        attention, feed_forward = layer.attention, layer.feed_forward
        body.append(Normalize("hidden", "normed", layer.input_norm))
        body.append(Project(attention.q, "normed", "query"))
        body.append(Project(attention.k, "normed", "key"))
        body.append(Project(attention.v, "normed", "value"))
        if attention.qk_norm_axis == "row":
            body.append(Normalize("query", "query", attention.q_norm))
            body.append(Normalize("key", "key", attention.k_norm))
        body.append(Rotate(index, attention))
        body.append(Attend(index, attention))
        body.extend(_join(attention.o, "attended", layer.post_attention_norm, layer.residual_scale))
        body.append(Normalize("hidden", "normed", layer.pre_feedforward_norm))
        if feed_forward.gate is not None:
            body.append(Project(feed_forward.gate, "normed", "gate"))
        body.append(Project(feed_forward.up, "normed", "up"))
        body.append(Activate(feed_forward))
        body.extend(_join(feed_forward.down, "activated", layer.post_feedforward_norm, layer.residual_scale))
    tail: list[Operation] = [Select(), Normalize("selected", "selected", spec.final_norm)]
    tail.append(Project(spec.head, "selected", "logits"))
    return Program(tuple(body), tuple(tail))


def _join(linear: Linear, source: Buffer, norm: Norm | None, scale: float) -> list[Operation]:
    """The branch's last product, joined to the residual stream, through a norm where there is one."""
    if norm is None:
        return [Project(linear, source, "hidden", scale)]
    return [Project(linear, source, "branch"), Normalize("branch", "branch", norm, scale)]
