"""`CUDATower` runs an encoder of images on a GPU, by torch's products and attention, beside a model's steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from realizar.backends.program import AttentionBlock, FeedForwardBlock, ends_layer, layer_blocks
from realizar.backends.tower_squares import between, squares_of
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import Activation, Linear, Norm, Rope
from realizar.models.spec import Attention, FeedForward
from realizar.models.tower import Projector, Tower

_COMPUTE = {"f32": torch.float32, "bf16": torch.bfloat16}


class CUDATower:
    """A tower on a device of torch, which encodes a picture at a time, in a stream of its own on a GPU.

    The residual stream, norms, rope and activations are float32; matrices, what they multiply, and attention have the
    type of the tower's matrices, float16 where these are quantised. All sums of products are float32.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, or not finite.
        UnsupportedModelError: a tensor's type does not run.
    """

    def __init__(self, tower: Tower, checkpoint: Checkpoint, device: torch.device) -> None:
        check_tensors(tower, checkpoint)
        self.tower, self._device = tower, device
        self._tensors = WeightTensors(tower, checkpoint)
        self._tensors.check_vectors()
        types = {self._tensors.layout(each.weight).float_type for each in tower.matrices()}
        self._compute = _COMPUTE.get(types.pop() or "", torch.float16) if len(types) == 1 else torch.float16
        self._matrices = {each.weight: self._loaded(each) for each in tower.matrices()}
        names = [*tower.vectors(), *(each.bias for each in tower.matrices() if each.bias is not None)]
        self._vectors = {name: torch.from_numpy(self._tensors.vector(name)).to(device) for name in names}
        blocks = [block for block in layer_blocks(tower.layers) if isinstance(block, AttentionBlock)]
        self._inputs = {block.layer: self._joined(block.attention.inputs()) for block in blocks}
        for block in blocks:
            for linear in block.attention.inputs():
                del self._matrices[linear.weight]
        self._stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None

    def _loaded(self, linear: Linear) -> torch.Tensor:
        source = self._tensors.matrix(linear.weight)
        source.check_finite(0, source.out_features)
        return torch.from_numpy(source.dequantize()).to(self._device, self._compute)

    def _joined(self, linears: Sequence[Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Matrices that read one input, one below the other, and their biases."""
        weights = torch.cat([self._matrices[each.weight] for each in linears])
        biases = [self._vectors[each.bias] for each in linears if each.bias is not None]
        return weights, torch.cat(biases).to(self._compute) if biases else None

    def encode(self, patches: NDArray[np.float32]) -> NDArray[np.float32]:
        """As `CPUTower.encode`."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            return self.run(torch.from_numpy(np.ascontiguousarray(patches)).to(self._device)).cpu().numpy()

    def run(self, patches: torch.Tensor) -> torch.Tensor:
        """`encode` where the tower computes, with nothing copied."""
        tower, (rows, columns, width) = self.tower, patches.shape
        colours = patches.reshape(-1, width)
        x = self._placed(rows, columns)
        for linear in tower.patches:
            x = x + self._product(colours, linear)
        if tower.input_norm is not None:
            x = self._normed(x, tower.input_norm)
        kept, blocks = [], layer_blocks(tower.layers)
        places = [layer for layer, _ in tower.deepstack]
        turns = {block.attention.rope: self._turns(block.attention.rope, rows, columns) for block in blocks if isinstance(block, AttentionBlock) and block.attention.rope}
        for index, block in enumerate(blocks):
            normed = self._normed(x, block.inputs.norm)
            if isinstance(block, AttentionBlock):
                found = self._attended(normed, block.attention, block.layer, turns)
            else:
                assert isinstance(block, FeedForwardBlock)
                found = self._fed(normed, block.feed_forward)
            x = x + found
            if block.layer in places and ends_layer(blocks, index):
                kept.append(x)
        streams = [self._normed(x, tower.final_norm), *kept]
        features = [
            self._projected(squares_of(stream.view(rows, columns, -1), tower.merge, by_channel=each.by_channel), each)
            for stream, each in zip(streams, tower.projectors, strict=True)
        ]
        return torch.cat(features, dim=1)

    def _placed(self, rows: int, columns: int) -> torch.Tensor:
        name, side = self.tower.positions, self.tower.side
        if name is None:
            return torch.zeros((), device=self._device)
        table = self._tensors.matrix(name).dequantize()
        if not self.tower.stretches or (rows, columns) == (side, side):
            return torch.from_numpy(table[: rows * columns]).to(self._device)
        down = between(rows, side) @ table.reshape(side, -1)
        across = between(columns, side) @ down.reshape(rows, side, -1)
        return torch.from_numpy(across.reshape(rows * columns, -1)).to(self._device)

    def _product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        bias = None if linear.bias is None else self._vectors[linear.bias].to(self._compute)
        return functional.linear(x.to(self._compute), self._matrices[linear.weight], bias)

    def _normed(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return x
        weight = self._vectors[norm.weight]
        if norm.kind == "rms":
            return functional.rms_norm(x, weight.shape, weight, norm.eps)
        return functional.layer_norm(x, weight.shape, weight, self._vectors[norm.bias] if norm.bias else None, norm.eps)

    def _turns(self, rope: Rope, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [patches, 1, half]."""
        places = np.indices((rows, columns), np.int32).reshape(2, -1)
        angles = places[list(rope.axes)].T.astype(np.float32) * np.array(rope.inverse_frequencies, np.float32)
        return tuple(torch.from_numpy(each[:, None]).to(self._device) for each in (np.cos(angles), np.sin(angles)))

    def _attended(self, x: torch.Tensor, attention: Attention, layer: int, turns: dict) -> torch.Tensor:
        weights, bias = self._inputs[layer]
        joined = functional.linear(x.to(self._compute), weights, bias)
        heads = joined.view(len(x), -1, attention.head_size)
        query, key, value = heads.split([attention.num_heads, attention.num_kv_heads, attention.num_kv_heads], dim=1)
        if attention.rope is not None:
            cosine, sine = turns[attention.rope]
            query, key = (_turned(each, cosine, sine, attention.rope) for each in (query, key))
        found = functional.scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in (query, key, value)), scale=attention.scale
        )[0]
        return self._product(found.transpose(0, 1).reshape(len(x), -1), attention.o)

    def _fed(self, x: torch.Tensor, part: FeedForward) -> torch.Tensor:
        up = self._product(x, part.up)
        up = _activated(up if part.gate is None else self._product(x, part.gate), part.activation) * (1 if part.gate is None else up)
        return self._product(up, part.down)

    def _projected(self, x: torch.Tensor, projector: Projector) -> torch.Tensor:
        x = self._normed(x, projector.norm)
        if projector.reduction is not None:
            x = self._product(x, projector.reduction)
        x = self._product(x, projector.first)
        if projector.second is None or projector.activation is None:
            return x.float()
        return self._product(_activated(x, projector.activation), projector.second).float()


def _activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Heads [patches, heads, head size] rotated, in their own type."""
    if rope.pairing == "interleaved":
        first, second = x[..., ::2].float(), x[..., 1::2].float()
        return torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1).flatten(-2).to(x.dtype)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1).to(x.dtype)
