"""What an encoder of images takes of a GPU, and what it can't run there, known from its headers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realizar.backends.program import AttentionBlock, Block, FeedForwardBlock, layer_blocks
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import Linear
from realizar.models.spec import FeedForward
from realizar.models.tower import Tower

_COMPUTE = {"f32": torch.float32, "bf16": torch.bfloat16}
ANY = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Numbers of a tower's buffers, for its largest picture: `pixels` are bytes, `hidden` and `features` float32, and
    the others of the type that products have.
    """

    pixels: int
    hidden: int
    features: int
    normed: int
    sums: int
    inner: int

    def size_bytes(self, element: int) -> int:
        return self.pixels + 4 * (self.hidden + self.features) + element * (self.normed + self.sums + self.inner)


def buffer_sizes(tower: Tower) -> BufferSizes:
    most, merged = tower.max_tokens, tower.max_patches // tower.merge**2
    hidden, sums, inner = most * tower.hidden_size, [most * tower.hidden_size], [0]
    for block in layer_blocks(tower.layers):
        sums.append(most * sum(each.out_features for each in block.inputs.linears))
        inner.append(most * (0 if block.join.linear is None else block.join.linear.in_features))
        if isinstance(block, AttentionBlock):
            attention = block.attention
            inner.append(most * (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_size)
    for projector in tower.projectors:
        together = sum(each.out_features for each in projector.linears()[-3:-1])  # as gate and up are
        sums += [merged * each.out_features for each in projector.linears()] + [merged * together]
        inner += [merged * each.out_features for each in projector.linears()]
    features = merged * tower.num_features
    return BufferSizes(tower.max_patches * 3 * tower.patch_size**2, hidden, features, hidden, max(sums), max(inner))


def planned_bytes(tower: Tower, checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of weights, and of what the largest picture takes, from headers alone; raises as a load does."""
    check_tensors(tower, checkpoint)
    check_blocks(tower, layer_blocks(tower.layers))
    element = compute_type(tower, WeightTensors(tower, checkpoint)).itemsize
    weights = sum(element * each.out_features * each.in_features + 4 * each.out_features for each in tower.matrices())
    places = 2 * tower.side if tower.by_axis else tower.side**2 + tower.max_tokens - tower.max_patches
    table = 0 if tower.positions is None else 4 * places * tower.hidden_size
    return weights + table, buffer_sizes(tower).size_bytes(element) + passing_bytes(tower, element)


def passing_bytes(tower: Tower, element: int) -> int:
    """Of what torch allocates, and frees, while the largest picture is encoded."""
    colours = tower.max_patches * sum(each.in_features for each in tower.patches)
    passing = (8 + element) * colours + 2 * element * tower.max_tokens * tower.hidden_size
    bounded = [each.in_features for each in tower.matrices() if each.clamps is not None]
    return passing + element * tower.max_tokens * max(bounded, default=0)


def compute_type(tower: Tower, tensors: WeightTensors) -> torch.dtype:
    types = {tensors.layout(each.weight).float_type for each in tower.matrices()}
    return _COMPUTE.get(types.pop() or "", torch.float16) if len(types) == 1 else torch.float16


def check_blocks(tower: Tower, blocks: Sequence[Block]) -> None:
    """UnsupportedModelError for parts that a tower does not have here."""
    matrices = tower.matrices()
    if any(each.clamps is not None for each in matrices) and any(each.bias is not None for each in matrices):
        raise UnsupportedModelError(
            f"{tower.architecture}: an encoder with bounds of matrices and biases does not run on a GPU"
        )
    for block in blocks:
        if isinstance(block, AttentionBlock):
            attention = block.attention
            per_token = attention.qk_norm_axis == "token" and (attention.q_norm or attention.k_norm)
            others = attention.soft_cap, attention.sinks, attention.gate, attention.query_growth
            if not per_token and not attention.is_k_also_v and all(each is None for each in others):
                continue
        elif isinstance(block, FeedForwardBlock):
            continue
        raise UnsupportedModelError(
            f"{tower.architecture}: layer {block.layer} of the encoder has a part that it does not run on a GPU"
        )


def groups(tower: Tower, blocks: Sequence[Block]) -> list[tuple[Linear, ...]]:
    """All matrices; those that read one input together."""
    groups: list[tuple[Linear, ...]] = [(each,) for each in tower.patches]
    for block in blocks:
        groups += [block.inputs.linears, *([] if block.join.linear is None else [(block.join.linear,)])]
    for projector in tower.projectors:
        groups += [(each,) for each in (projector.reduction, projector.first) if each is not None]
        second = projector.second
        if isinstance(second, FeedForward):
            groups += [second.linears()[:-1], (second.down,)]
        elif second is not None:
            groups.append((second,))
    return groups


def read_together(group: Sequence[Linear]) -> tuple[tuple[int, tuple[float, float] | None], ...]:
    """How many rows of a group's matrices, one after another, read the same, within which bounds; None for any."""
    found: list[tuple[int, tuple[float, float] | None]] = []
    for each in group:
        bounds = None if each.clamps is None or each.clamps.read == ANY else each.clamps.read
        rows, before = found.pop() if found and found[-1][1] == bounds else (0, bounds)
        found.append((rows + each.out_features, before))
    return tuple(found)
