"""`CUDATower` runs an encoder of images on a GPU: torch multiplies and attends, kernels of text models do the rest."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from realizar.backends.cuda.capture import GraphRecorder
from realizar.backends.cuda.device_errors import step_errors
from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, activation_blocks, padded_head, rotate_sizes, whole_width
from realizar.backends.cuda.kernels import store_inputs as formats
from realizar.backends.cuda.kernels.activate import NO_ACTIVATION, activate
from realizar.backends.cuda.kernels.normalize import normalize
from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.backends.cuda.kernels.rotate import rotate
from realizar.backends.cuda.norms import NORM_KINDS, norm_constants
from realizar.backends.parts import places_between, squares_of
from realizar.backends.program import AttentionBlock, Block, FeedForwardBlock, Join, ends_layer, layer_blocks
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import StepError, UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import Activation, Linear, Norm, Rope
from realizar.models.spec import Attention, FeedForward
from realizar.models.tower import Tower

_GRAPHS = 8  # grids whose graph is kept, those that were used last
_COMPUTE = {"f32": torch.float32, "bf16": torch.bfloat16}


@dataclass(slots=True)
class _Grid:
    """Pictures of so many rows and columns of patches.

    `angles`: cosines and sines of each rope, float32 [patches, half of its size]. `shares`: of the rows and the columns
    of the table of positions in those of the picture; None where it has the table's own. `graph`: once it came again.
    """

    rows: int
    columns: int
    angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]]
    shares: tuple[torch.Tensor, torch.Tensor] | None
    graph: torch.cuda.CUDAGraph | None = field(default=None)
    seen: bool = False

    @property
    def count(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a product, [rows, out_features] and a bias that they still lack; float16 are divided by `HALF_FACTOR`."""

    values: torch.Tensor
    bias: torch.Tensor | None


class CUDATower:
    """A tower on a GPU, which encodes a picture at a time on a stream of its own; threads may share it.

    The stream of patches, norms, ropes and activations are float32; matrices, what they multiply, and attention have
    the type of the tower's matrices, float16 where these are quantised. All sums of products are float32 until they are
    rounded to that type.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, or not finite.
        UnsupportedModelError: a tensor's type does not run, or a part of a layer.
    """

    def __init__(self, tower: Tower, checkpoint: Checkpoint, device: torch.device) -> None:
        check_tensors(tower, checkpoint)
        self.tower, self._device = tower, device
        self._blocks = layer_blocks(tower.layers)
        check_blocks(tower, self._blocks)
        self._tensors = WeightTensors(tower, checkpoint)
        self._tensors.check_vectors()
        self._compute = compute_type(tower, self._tensors)
        self._weights: dict[tuple[Linear, ...], tuple[torch.Tensor, torch.Tensor | None]] = {}
        for group in _groups(tower, self._blocks):
            self._weights[group] = self._loaded(group)
        self._vectors: dict[tuple[str, float, float], torch.Tensor] = {}
        self._none = torch.zeros(1, device=device)
        self._positions = (
            None if tower.positions is None else self._sent(self._tensors.matrix(tower.positions).dequantize())
        )
        sizes = buffer_sizes(tower)
        self._pixels = torch.zeros(sizes.pixels, dtype=torch.uint8, device=device)
        self._staged = torch.zeros(sizes.pixels, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._hidden, self._features = (torch.zeros(size, device=device) for size in (sizes.hidden, sizes.features))
        self._normed, self._sums, self._inner = (
            torch.zeros(size, dtype=self._compute, device=device) for size in (sizes.normed, sizes.sums, sizes.inner)
        )
        self._places = torch.arange(tower.max_patches, dtype=torch.int32, device=device)
        preparation = tower.preparation
        mean, deviation = (
            np.array(colour, np.float32)[:, None] for colour in (preparation.mean, preparation.deviation)
        )
        shades = (np.arange(256) * (1 / 255)).astype(np.float32)
        self._shades = self._sent((shades - mean) / deviation).to(self._compute).reshape(-1)
        self._grids: OrderedDict[tuple[int, int], _Grid] = OrderedDict()
        self._lock = threading.Lock()
        self._stream, self._recorder = None, None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._recorder = GraphRecorder(device, self._stream)
            torch.cuda.synchronize(device)

    @property
    def size_bytes(self) -> int:
        """Of weights and buffers."""
        weights = [each for pair in self._weights.values() for each in pair if each is not None]
        buffers = [self._pixels, self._hidden, self._features, self._normed, self._sums, self._inner]
        return sum(each.numel() * each.element_size() for each in (*weights, *buffers))

    def _sent(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _loaded(self, group: tuple[Linear, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Matrices that read one input, one below the other, and their biases."""
        sources = [self._tensors.matrix(each.weight) for each in group]
        for source in sources:
            source.check_finite(0, source.out_features)
        weights = torch.cat([self._sent(source.dequantize()).to(self._compute) for source in sources])
        if all(each.bias is None for each in group):
            return weights, None
        biases = [
            np.zeros(each.out_features, np.float32) if each.bias is None else self._tensors.vector(each.bias)
            for each in group
        ]
        return weights, self._sent(np.concatenate(biases))

    def encode(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The features of a picture, float32 [squares, features], row by row, those of all projectors side by side.

        `picture` is uint8 [height, width, 3], whole squares of patches and `max_patches` at most. StepError where the
        features are not finite, or a kernel fails.
        """
        with self._lock, step_errors(self._device), torch.cuda.stream(self._stream):
            grid = self._grid(*(edge // self.tower.patch_size for edge in picture.shape[:2]))
            self._staged.numpy()[: picture.size] = picture.reshape(-1)
            self._pixels[: picture.size].copy_(self._staged[: picture.size], non_blocking=True)
            self.start(grid.rows, grid.columns)
            found = self._found(grid.count)
            features = torch.empty(found.shape, pin_memory=self._stream is not None)
            features.copy_(found, non_blocking=True)
            if not torch.isfinite(found).all():  # which waits for the stream
                raise StepError(f"the features of a picture of {picture.shape[:2]} pixels are not finite")
        return features.numpy()

    def start(self, rows: int, columns: int) -> None:
        """Start the kernels for the pixels that are there, on the current stream: by a graph from the second time on.

        The features are in the device's memory then.
        """
        grid = self._grid(rows, columns)
        if grid.graph is not None:
            grid.graph.replay()
            return
        if grid.seen and self._recorder is not None:
            grid.graph = self._recorder.record(lambda: self._run(grid))
            grid.graph.replay()
            return
        grid.seen = True
        self._run(grid)

    def _grid(self, rows: int, columns: int) -> _Grid:
        found = self._grids.get((rows, columns))
        if found is None:
            found = self._grids[rows, columns] = self._new_grid(rows, columns)
            if len(self._grids) > _GRAPHS:
                self._grids.popitem(last=False)
        self._grids.move_to_end((rows, columns))
        return found

    def _new_grid(self, rows: int, columns: int) -> _Grid:
        places, side = np.indices((rows, columns), np.int32).reshape(2, -1), self.tower.side
        angles = {}
        for rope in {block.attention.rope for block in self._blocks if isinstance(block, AttentionBlock)}:
            if rope is not None:
                turns = places[list(rope.axes)].T.astype(np.float32) * np.array(rope.inverse_frequencies, np.float32)
                angles[rope] = self._sent(np.cos(turns)), self._sent(np.sin(turns))
        stretches = self.tower.stretches
        if stretches is None or (rows, columns) == (side, side):
            return _Grid(rows, columns, angles, None)
        shares = [self._sent(places_between(stretches, count, side)) for count in (rows, columns)]
        return _Grid(rows, columns, angles, (shares[0], shares[1]))

    def _found(self, patches: int) -> torch.Tensor:
        """The features of a picture of so many patches, where `start` leaves them."""
        width, rows = self.tower.num_features, patches // self.tower.merge**2
        return self._features[: rows * width].view(rows, width)

    def _run(self, grid: _Grid) -> None:
        """`start`, kernel by kernel."""
        tower, count = self.tower, grid.count
        hidden = self._hidden[: count * tower.hidden_size].view(count, -1)
        normed = self._normed[: hidden.numel()].view_as(hidden)
        self._place(grid, hidden)
        colours = self._colours(grid)
        for linear in tower.patches:
            self._norm(hidden, None, None, (self._multiplied(colours, linear), _ADDED))
        if tower.input_norm is not None:
            self._norm(hidden, tower.input_norm, hidden)
        features, added = self._found(count), None
        taken = {layer: place for place, (layer, _) in enumerate(tower.deepstack, start=1)}
        for index, block in enumerate(self._blocks):
            self._norm(hidden, block.inputs.norm, normed, added)
            sums = self._multiplied(normed, *block.inputs.linears)
            if isinstance(block, AttentionBlock):
                inner = self._attended(sums, block.attention, grid)
            else:
                assert isinstance(block, FeedForwardBlock)
                part = block.feed_forward
                inner = self._activated(sums, part.activation, part.down.in_features, gated=part.gate is not None)
            assert block.join.linear is not None
            added = self._multiplied(inner, block.join.linear), block.join
            if block.layer in taken and ends_layer(self._blocks, index):
                self._norm(hidden, None, None, added)
                added = None
                self._project(taken[block.layer], hidden, grid, features)
        if tower.projector.norm is None:
            self._norm(hidden, tower.final_norm, normed, added)
            self._project(0, normed, grid, features)
        else:
            self._norm(hidden, tower.final_norm, hidden, added)
            self._project(0, hidden, grid, features)

    def _colours(self, grid: _Grid) -> torch.Tensor:
        """Of all patches, as `images.prepare.patches_of` makes them."""
        size, (rows, columns) = self.tower.patch_size, (grid.rows, grid.columns)
        pixels = self._pixels[: grid.count * 3 * size**2].view(rows, size, columns, size, 3).transpose(1, 2)
        places = pixels + torch.arange(0, 3 * 256, 256, dtype=torch.int32, device=self._device)
        if not self.tower.by_pixel:
            places = places.permute(0, 1, 4, 2, 3)
        colours = self._shades.index_select(0, places.reshape(-1)).view(grid.count, 3, 1, -1)
        frames = self.tower.patches[0].in_features // (3 * size**2)
        return colours.expand(-1, -1, frames, -1).reshape(grid.count, -1)

    def _place(self, grid: _Grid, hidden: torch.Tensor) -> None:
        """Begin the stream with what the tower adds to patches by their place."""
        if self._positions is None:
            hidden.zero_()
        elif grid.shares is None:
            hidden.copy_(self._positions[: grid.count])
        else:
            rows, columns = grid.shares
            down = (rows @ self._positions.view(self.tower.side, -1)).view(grid.rows, self.tower.side, -1)
            torch.matmul(columns, down, out=hidden.view(grid.rows, grid.columns, -1))

    def _multiplied(self, x: torch.Tensor, *group: Linear) -> _Sums:
        weights, bias = self._weights[group]
        out = self._sums[: len(x) * len(weights)].view(len(x), -1)
        factor = 1.0 / HALF_FACTOR.value if self._compute == torch.float16 else 1.0
        torch.addmm(out, x, weights.t(), beta=0.0, alpha=factor, out=out)
        return _Sums(out, bias)

    def _norm(
        self, source: torch.Tensor, norm: Norm | None, out: torch.Tensor | None, added: tuple[_Sums, Join] | None = None
    ) -> None:
        """out = norm(source), float32 [rows, width], to which a product is added first, as its join says."""
        cut, none, (rows, width) = whole_width(source.shape[1]), self._none, source.shape
        sums, join = (_Sums(none, None), _ADDED) if added is None else added
        factor = 1.0 if join.output_scale is None else float(self._tensors.vector(join.output_scale)[0])
        target, stride, stored = (none, 0, formats.NOTHING) if out is None else (out, out.stride(0), formats.PLAIN)
        normalize[(rows,)](
            sums.values, 0, width, none if sums.bias is None else sums.bias, none, *self._norm_arguments(join.norm),
            float(join.scale), factor, source, *self._norm_arguments(norm), target, stride, none, none, none, width,
            none, SPLITS=0 if added is None else 1, MATMUL_BIAS=sums.bias is not None, GATHER=False,
            FORMAT=stored.value, BLOCK_TOKENS=1, CHUNKS=1, DEPENDENT=False, PARTS=0, BLOCK=cut.block,
            num_warps=cut.warps, **norm_constants("", norm), **norm_constants("BRANCH_", join.norm),
        )  # fmt: skip

    def _norm_arguments(self, norm: Norm | None) -> tuple[torch.Tensor, torch.Tensor, float]:
        if norm is None:
            return self._none, self._none, 0.0
        weight = self._vector(norm.weight, norm.weight_offset, norm.weight_scale)
        return weight, self._none if norm.bias is None else self._vector(norm.bias), float(norm.eps)

    def _vector(self, name: str, offset: float = 0.0, scale: float = 1.0) -> torch.Tensor:
        key = name, offset, scale
        if key not in self._vectors:
            self._vectors[key] = self._sent((self._tensors.vector(name) + np.float32(offset)) * np.float32(scale))
        return self._vectors[key]

    def _attended(self, sums: _Sums, attention: Attention, grid: _Grid) -> torch.Tensor:
        heads, kv_heads, size, rope = attention.num_heads, attention.num_kv_heads, attention.head_size, attention.rope
        count, most, none = grid.count, self.tower.max_patches, self._none
        query, keys, values = (
            each.view(-1, most, size)
            for each in self._inner[: (heads + 2 * kv_heads) * most * size].split(
                [heads * most * size, kv_heads * most * size, kv_heads * most * size]
            )
        )
        query = query.view(-1)[: count * heads * size].view(count, heads, size)
        norm = attention.q_norm or attention.k_norm
        query_norm, query_bias, _ = self._norm_arguments(attention.q_norm)
        key_norm, key_bias, eps = self._norm_arguments(attention.k_norm)
        cosine, sine = (none, none) if rope is None else grid.angles[rope]
        parts, warps = rotate_sizes(attention, norms=norm is not None or attention.v_norm_eps is not None)
        rotate[(count, -(-(heads + 2 * kv_heads) // parts))](
            sums.values, 0, sums.values.stride(0), none if sums.bias is None else sums.bias, self._places, cosine, sine,
            none, query_norm, key_norm, query_bias, key_bias, eps, float(attention.v_norm_eps or 0.0), heads * size,
            (heads + kv_heads) * size, keys, values, none, none, self._places, query, heads * size, SPLITS=1,
            BIAS=sums.bias is not None, HEADS=heads, KV_HEADS=kv_heads, HEAD=size, ROTARY=rope.size if rope else 0,
            INTERLEAVED=bool(rope and rope.pairing == "interleaved"), NORM=NORM_KINDS[norm.kind] if norm else 0,
            NORM_BIAS=bool(norm and norm.bias), VALUE_NORM=attention.v_norm_eps is not None, GROWTH=False, STORED=False,
            PADDED_HEAD=padded_head(attention), BLOCK_SIZE=most, INT8=False, DEPENDENT=False, PARTS=parts,
            num_warps=warps,
        )  # fmt: skip
        found = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None, :, :count], values[None, :, :count], scale=attention.scale,
            enable_gqa=heads != kv_heads,
        )  # fmt: skip
        return found[0].transpose(0, 1).reshape(count, -1)

    def _activated(
        self, sums: _Sums, activation: Activation | None, width: int, out: torch.Tensor | None = None, *, gated: bool
    ) -> torch.Tensor:
        """activation(gate) * up, or activation(up), of `width` columns; None is no activation."""
        rows, none = len(sums.values), self._none
        if out is None:
            out = self._inner[: rows * width].view(rows, width)
        cut = activation_blocks(width, rows)
        activate[(rows, cut.blocks)](
            sums.values, 0, sums.values.stride(0), none if sums.bias is None else sums.bias, width if gated else 0,
            width, out, out.stride(0), none, none, none, none, none, SPLITS=1, BIAS=sums.bias is not None,
            KIND=NO_ACTIVATION.value if activation is None else ACTIVATIONS[activation], GATED=gated, INTERLEAVED=False,
            FORMAT=formats.PLAIN.value, BLOCK_TOKENS=1, CHUNKS=1, DEPENDENT=False, BLOCK=cut.block,
            num_warps=cut.warps,
        )  # fmt: skip
        return out

    def _project(self, place: int, patches: torch.Tensor, grid: _Grid, features: torch.Tensor) -> None:
        """Write the features of the projector of a place; the patches are float32 where it has a norm of its own."""
        projector, tower = self.tower.projectors[place], self.tower
        before = sum(each.num_features for each in tower.projectors[:place])
        out = features[:, before : before + projector.num_features]
        x = squares_of(patches.view(grid.rows, grid.columns, -1), tower.merge, projector)
        if projector.norm is not None:
            normed = self._normed[: x.numel()].view_as(x)
            self._norm(x, projector.norm, normed)
            x = normed
        if projector.reduction is not None:
            x = self._activated(
                self._multiplied(x, projector.reduction), None, projector.reduction.out_features, gated=False
            )
        sums, second = self._multiplied(x, projector.first), projector.second
        if second is not None:
            assert isinstance(second, Linear)  # as `check_blocks` saw
            x = self._activated(sums, projector.activation, second.in_features, gated=False)
            sums = self._multiplied(x, second)
        self._activated(sums, None, projector.num_features, out, gated=False)


_ADDED = Join(None, None, 1.0)
"""How a product is added to the stream where no block says otherwise."""


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
    most, merged = tower.max_patches, tower.max_patches // tower.merge**2
    hidden, sums, inner = most * tower.hidden_size, [most * tower.hidden_size], [0]
    for block in layer_blocks(tower.layers):
        sums.append(most * sum(each.out_features for each in block.inputs.linears))
        inner.append(most * (0 if block.join.linear is None else block.join.linear.in_features))
        if isinstance(block, AttentionBlock):
            attention = block.attention
            inner.append(most * (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_size)
    for projector in tower.projectors:
        sums += [merged * each.out_features for each in projector.linears()]
        inner += [merged * each.out_features for each in projector.linears()]
    features = merged * tower.num_features
    return BufferSizes(most * 3 * tower.patch_size**2, hidden, features, hidden, max(sums), max(inner))


def planned_bytes(tower: Tower, checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of weights, and of what the largest picture takes, from headers alone; raises as a load does."""
    check_tensors(tower, checkpoint)
    check_blocks(tower, layer_blocks(tower.layers))
    element = compute_type(tower, WeightTensors(tower, checkpoint)).itemsize
    weights = sum(element * each.out_features * each.in_features + 4 * each.out_features for each in tower.matrices())
    table = 0 if tower.positions is None else 4 * tower.side**2 * tower.hidden_size
    colours = tower.max_patches * sum(each.in_features for each in tower.patches)
    passing = (8 + element) * colours + 2 * element * tower.max_patches * tower.hidden_size  # what torch hands on
    return weights + table, buffer_sizes(tower).size_bytes(element) + passing


def compute_type(tower: Tower, tensors: WeightTensors) -> torch.dtype:
    types = {tensors.layout(each.weight).float_type for each in tower.matrices()}
    return _COMPUTE.get(types.pop() or "", torch.float16) if len(types) == 1 else torch.float16


def check_blocks(tower: Tower, blocks: Sequence[Block]) -> None:
    """UnsupportedModelError for a layer with parts that a tower does not have here, and one for the CPU's steps."""
    gated = any(isinstance(each.second, FeedForward) or each.inner_norm is not None for each in tower.projectors)
    for is_there, part in (
        (tower.class_token is not None, "a class token"),
        (tower.by_axis or tower.final_norm is None, "tables of two axes"),
        (tower.input_norm is not None and tower.positions is not None, "positions after a norm"),
        (gated, "a feed-forward in its projector"),
    ):
        if is_there:
            raise UnsupportedModelError(f"{tower.architecture}: an encoder with {part} does not run on a GPU")
    for block in blocks:
        if isinstance(block, AttentionBlock):
            attention = block.attention
            per_token = attention.qk_norm_axis == "token" and (attention.q_norm or attention.k_norm)
            others = attention.window, attention.soft_cap, attention.sinks, attention.gate, attention.query_growth
            if not per_token and not attention.is_k_also_v and all(each is None for each in others):
                continue
        elif isinstance(block, FeedForwardBlock):
            continue
        raise UnsupportedModelError(
            f"{tower.architecture}: layer {block.layer} of the encoder has a part that it does not run on a GPU"
        )


def _groups(tower: Tower, blocks: Sequence[Block]) -> list[tuple[Linear, ...]]:
    """All matrices; those that read one input together."""
    groups: list[tuple[Linear, ...]] = [(each,) for each in tower.patches]
    for block in blocks:
        groups += [block.inputs.linears, *([] if block.join.linear is None else [(block.join.linear,)])]
    return [*groups, *((each,) for projector in tower.projectors for each in projector.linears())]
