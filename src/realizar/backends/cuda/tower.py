"""`CUDATower` runs an encoder of images on a GPU: torch multiplies and attends, kernels of text models do the rest."""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from realizar.backends.cuda.capture import GraphRecorder, failure_of
from realizar.backends.cuda.device_errors import device_errors, step_errors
from realizar.backends.cuda.kernel_sizes import ACTIVATIONS, activation_blocks, padded_head, whole_width
from realizar.backends.cuda.kernels import store_inputs as formats
from realizar.backends.cuda.kernels.activate import NO_ACTIVATION, activate
from realizar.backends.cuda.kernels.normalize import normalize
from realizar.backends.cuda.kernels.reduce import BOUNDS, HALF_FACTOR
from realizar.backends.cuda.kernels.rotate import rotate
from realizar.backends.cuda.norms import NORM_KINDS, norm_constants
from realizar.backends.cuda.pictures.grids import Grid, new_grid
from realizar.backends.cuda.pictures.pinned import PinnedRoom, pinned_bytes
from realizar.backends.cuda.pictures.slices import PartsLeft, Slicer, attention_s, matmuls_s, recorded, wait_for
from realizar.backends.cuda.tower_plan import (
    ANY,
    buffer_sizes,
    check_blocks,
    compute_type,
    groups,
    passing_bytes,
    read_together,
)
from realizar.backends.parts import squares_of
from realizar.backends.program import AttentionBlock, FeedForwardBlock, Join, ends_layer, layer_blocks
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.errors import StepError
from realizar.models.check_tensors import check_tensors
from realizar.models.parts import Activation, Linear, Norm
from realizar.models.spec import Attention, FeedForward
from realizar.models.tower import Standard, Tower

_LOG = logging.getLogger(__name__)
_GRAPHS = 8  # grids whose graph is kept, those that were used last
_COPIED_BYTES = 4 << 20  # at once, of features: a step's results may wait for them
_LEAST_GRAPH_S = 1e-4  # of what is launched at once
_MOST_AT_ONCE = 1e11  # FLOP of attention in one launch
_WARMED = 8  # squares of the edge of a small picture
_ROTATED = 8, 2  # heads that one program rotates, and its warps: pictures have tokens enough for all of the card


@dataclass(slots=True)
class _Encoding:
    """A picture that is being encoded.

    `features`: memory of the host for them. `sent`: recorded once its pixels are there. `parts`: what is still to be
    launched, None before the first. `launched`: recorded behind the last one.
    """

    grid: Grid
    features: NDArray[np.float32]
    sent: torch.cuda.Event | None
    parts: PartsLeft | None = None
    launched: torch.cuda.Event | None = None


_Bounds: TypeAlias = tuple[float, float]
"""The least and the largest that a number may be; what is beyond becomes these."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a product, [rows, out_features], and what they still lack: a bias, or the bounds of each matrix; float16 are
    divided by `HALF_FACTOR`.
    """

    values: torch.Tensor
    bias: torch.Tensor | None
    bounds: tuple[_Bounds, ...] = ()


@dataclass(frozen=True, slots=True)
class _Weights:
    """Matrices that read one input, one below the other, [out_features, in_features], and their biases.

    `reads`: of so many rows, one after another, the bounds of what they read, None for any. `given`: those of each
    matrix's sums; none where no matrix has any.
    """

    values: torch.Tensor
    bias: torch.Tensor | None
    reads: tuple[tuple[int, _Bounds | None], ...]
    given: tuple[_Bounds, ...]

    @property
    def read(self) -> _Bounds | None:
        """The bounds of what all of them read."""
        return self.reads[0][1] if len(self.reads) == 1 else None


class CUDATower:
    """A tower on a GPU, which encodes a picture at a time; threads may share `encode`.

    Or it is encoded in slices between other launches: `begin`, `go_on` until nothing is left, and `features`. The first
    and the last may be called on another thread than `go_on`, which launches on the current stream.

    The stream of patches, norms, ropes and activations are float32; matrices, what they multiply, and attention have
    the type of the tower's matrices, float16 where these are quantised. All sums of products are float32 until they are
    rounded to that type.

    Raises:
        CheckpointError: a tensor is missing, left over, of the wrong shape, or not finite.
        UnsupportedModelError: a tensor's type does not run, or a part of a layer.
        CapacityError, KernelError, DeviceLostError: it does not fit, or the device can't run it.
    """

    def __init__(self, tower: Tower, checkpoint: Checkpoint, device: torch.device) -> None:
        check_tensors(tower, checkpoint)
        self.tower, self._device = tower, device
        self._blocks = layer_blocks(tower.layers)
        check_blocks(tower, self._blocks)
        self._others = tower.max_tokens - tower.max_patches
        with device_errors(device):
            self._load(WeightTensors(tower, checkpoint))

    def _load(self, tensors: WeightTensors) -> None:
        tower, device = self.tower, self._device
        self._tensors = tensors
        self._tensors.check_vectors()
        self._compute = compute_type(tower, self._tensors)
        self._weights = {group: self._loaded(group) for group in groups(tower, self._blocks)}
        self._vectors: dict[tuple[str, float, float], torch.Tensor] = {}
        self._tables: dict[tuple[_Bounds, ...], torch.Tensor] = {}
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
        self._places = torch.arange(tower.max_tokens, dtype=torch.int32, device=device)
        preparation = tower.preparation
        mean, deviation = (
            np.array(colour, np.float32)[:, None] for colour in (preparation.mean, preparation.deviation)
        )
        shades = (np.arange(256) * (1 / 255)).astype(np.float32)
        self._shades = self._sent((shades - mean) / deviation).to(self._compute).reshape(-1)
        self._room = PinnedRoom(pinned_bytes() if device.type == "cuda" else 0, is_gpu=device.type == "cuda")
        self._grids: OrderedDict[tuple[int, int], Grid] = OrderedDict()
        self._lock = threading.Lock()
        self._encoding: _Encoding | None = None
        self._slicer = Slicer(is_gpu=device.type == "cuda")
        self._copies, self._recorder = None, None
        self._held: torch.Tensor | None = None  # until the first picture, whose kernels then find that memory
        if device.type == "cuda":
            self._copies, self._recorder = torch.cuda.Stream(device), GraphRecorder(device)
            self._warm()

    def _warm(self) -> None:
        """Compile kernels, and let libraries choose theirs, which the first image would wait for."""
        merge, largest = self.tower.merge, math.isqrt(self.tower.max_patches) // self.tower.merge
        for edge in {min(_WARMED, largest), largest}:
            pixels = edge * merge * self.tower.patch_size
            self.encode(np.zeros((pixels, pixels, 3), np.uint8))
        self._grids.clear()
        torch.cuda.empty_cache()
        num_bytes = passing_bytes(self.tower, self._compute.itemsize)
        self._held = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @property
    def size_bytes(self) -> int:
        """Of weights and buffers."""
        weights = [each for one in self._weights.values() for each in (one.values, one.bias) if each is not None]
        buffers = [self._pixels, self._hidden, self._features, self._normed, self._sums, self._inner]
        buffers += [] if self._positions is None else [self._positions]
        return sum(each.numel() * each.element_size() for each in (*weights, *buffers))

    def _sent(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _loaded(self, group: tuple[Linear, ...]) -> _Weights:
        sources = [self._tensors.matrix(each.weight) for each in group]
        for source in sources:
            source.check_finite(0, source.out_features)
        weights = torch.cat([self._sent(source.dequantize()).to(self._compute) for source in sources])
        bias, given = None, tuple[_Bounds, ...]()
        if any(each.bias is not None for each in group):
            biases = [
                np.zeros(each.out_features, np.float32) if each.bias is None else self._tensors.vector(each.bias)
                for each in group
            ]
            bias = self._sent(np.concatenate(biases))
        if any(each.clamps is not None for each in group):
            given = tuple(ANY if each.clamps is None else each.clamps.given for each in group)
        return _Weights(weights, bias, read_together(group), given)

    @property
    def _factor(self) -> float:
        """Of a product in its sums."""
        return 1.0 / HALF_FACTOR.value if self._compute == torch.float16 else 1.0

    def encode(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The features of a picture, float32 [squares, features], row by row, those of all projectors side by side.

        `picture` is uint8 [height, width, 3], whole squares of patches and `max_patches` at most. StepError where the
        features are not finite, or a kernel fails.
        """
        with self._lock:
            self.begin(picture)
            self.go_on(math.inf)
            return self.features()

    def begin(self, picture: NDArray[np.uint8]) -> None:
        """Send a picture as of `encode` to the device. The features of the one before have been taken."""
        with step_errors(self._device), torch.cuda.stream(self._copies):
            self._held = None
            grid = self._grid(*(edge // self.tower.patch_size for edge in picture.shape[:2]))
            shape = self._found(grid.count).shape
            features = self._room.take(shape)
            if features is None:
                features = torch.empty(shape, pin_memory=self._copies is not None).numpy()
            self._staged.numpy()[: picture.size] = picture.reshape(-1)
            self._pixels[: picture.size].copy_(self._staged[: picture.size], non_blocking=True)
            self._encoding = _Encoding(grid, features, self._recorded())

    def go_on(self, seconds: float) -> bool:
        """Launch what takes no longer of the device, or all that is left, on the current stream; True if some is left.

        A part that takes longer alone is launched once the slices together had so long.
        """
        encoding = self._encoding
        assert encoding is not None
        with step_errors(self._device):
            if encoding.parts is None and encoding.sent is not None:
                if not math.isinf(seconds) and not encoding.sent.query():
                    return True  # steps would wait for its pixels
                torch.cuda.current_stream(self._device).wait_event(encoding.sent)
            if encoding.parts is None and math.isinf(seconds):
                self.start(encoding.grid.rows, encoding.grid.columns)
            else:
                encoding.parts = encoding.parts or PartsLeft(self._parts(encoding.grid))
                if self._slicer.launch(encoding.parts, seconds):
                    return True
            encoding.launched = self._recorded()
        return False

    def _recorded(self) -> torch.cuda.Event | None:
        return None if self._copies is None else recorded()

    def features(self) -> NDArray[np.float32]:
        """Those of the picture of which nothing is left to be launched; waits for them, and raises as `encode`."""
        encoding, self._encoding = self._encoding, None
        assert encoding is not None
        with step_errors(self._device), torch.cuda.stream(self._copies):
            if encoding.launched is not None:
                wait_for(encoding.launched)
            found, features = self._found(encoding.grid.count), torch.from_numpy(encoding.features)
            rows = max(_COPIED_BYTES // (4 * found.shape[1]), 1)
            for part, of in zip(features.split(rows), found.split(rows), strict=True):
                part.copy_(of, non_blocking=True)
            are_finite = torch.isfinite(found).all()
            if self._copies is not None:
                wait_for(recorded())
            if not are_finite:
                pixels = [edge * self.tower.patch_size for edge in (encoding.grid.rows, encoding.grid.columns)]
                raise StepError(f"the features of a picture of {pixels[0]} x {pixels[1]} pixels are not finite")
        return encoding.features

    def start(self, rows: int, columns: int) -> None:
        """Start all kernels for the pixels that are there, on the current stream: by graphs from the second time on.

        The features are in the device's memory then.
        """
        grid = self._grid(rows, columns)
        if not grid.graphs and grid.seen and self._recorder is not None:
            try:
                grid.graphs = self._graphs_of(grid, self._recorder)
            except Exception as error:  # noqa: BLE001 - raised again where the device failed
                _LOG.warning("pictures of %d x %d patches have no graphs: %s", rows, columns, failure_of(error))
                self._recorder = None
        grid.seen = True
        for _ in self._parts(grid):
            pass

    def _parts(self, grid: Grid) -> Iterator[float]:
        """As `_run`, by graphs where there are."""
        if not grid.graphs:
            yield from self._run(grid)
        for seconds, graph in grid.graphs:
            yield seconds
            graph.replay()

    def _graphs_of(self, grid: Grid, recorder: GraphRecorder) -> list[tuple[float, torch.cuda.CUDAGraph]]:
        """Of parts, or of as many together as are worth a launch, and the seconds of each."""
        parts, found = self._run(grid), list[tuple[float, torch.cuda.CUDAGraph]]()
        following = next(parts, None)
        while following is not None:
            together: list[float] = []

            def run(together: list[float] = together) -> None:
                nonlocal following
                while following is not None and sum(together) < _LEAST_GRAPH_S:
                    together.append(following)
                    following = next(parts, None)

            graph = recorder.record(run, goes_on=bool(found))
            found.append((sum(together), graph))
        return found

    def _grid(self, rows: int, columns: int) -> Grid:
        found = self._grids.get((rows, columns))
        if found is None:
            found = self._grids[rows, columns] = new_grid(self.tower, rows, columns, self._device)
            if len(self._grids) > _GRAPHS:
                self._grids.popitem(last=False)
        self._grids.move_to_end((rows, columns))
        return found

    def _found(self, patches: int) -> torch.Tensor:
        """The features of a picture of so many patches, where `start` leaves them."""
        width, rows = self.tower.num_features, patches // self.tower.merge**2
        return self._features[: rows * width].view(rows, width)

    def _run(self, grid: Grid) -> Iterator[float]:
        """Start the kernels part by part: the seconds that an H200 takes for about the next one, before it."""
        tower, count, tokens = self.tower, grid.count, grid.count + self._others
        hidden = self._hidden[: tokens * tower.hidden_size].view(tokens, -1)
        normed = self._normed[: hidden.numel()].view_as(hidden)
        yield matmuls_s(count, *tower.patches)
        self._begin(grid, hidden)
        features, added = self._found(count), None
        taken = {layer: place for place, (layer, _) in enumerate(tower.deepstack, start=1)}
        for index, block in enumerate(self._blocks):
            assert block.join.linear is not None
            yield matmuls_s(tokens, *block.inputs.linears)
            within = self._weights[block.inputs.linears].read
            self._norm(hidden, block.inputs.norm, normed, added, within)
            sums = self._multiplied(normed, *block.inputs.linears, within=within)
            if isinstance(block, AttentionBlock):
                inner = yield from self._attended(sums, block.attention, grid)
                within = None
                yield matmuls_s(tokens, block.join.linear)
            else:
                assert isinstance(block, FeedForwardBlock)
                part = block.feed_forward
                yield matmuls_s(tokens, block.join.linear)
                within = self._weights[block.join.linear,].read
                inner = self._activated(
                    sums, part.activation, part.down.in_features, gated=part.gate is not None, within=within
                )
            added = self._multiplied(inner, block.join.linear, within=within), block.join
            if block.layer in taken and ends_layer(self._blocks, index):
                self._norm(hidden, None, None, added)
                added = None
                yield from self._project(taken[block.layer], hidden[:count], grid, features)
        source = normed if tower.projector.norm is None and tower.projector.standard is None else hidden
        self._norm(hidden, tower.final_norm, source, added)
        yield from self._project(0, source[:count], grid, features)

    def _begin(self, grid: Grid, hidden: torch.Tensor) -> None:
        """Write the stream before the first layer."""
        tower, patches = self.tower, hidden[: grid.count]
        hidden.zero_()
        if tower.input_norm is None:
            self._place(grid, patches)
        colours = self._colours(grid)
        for linear in tower.patches:
            self._norm(patches, None, None, (self._multiplied(colours, linear), _ADDED))
        if tower.input_norm is not None:
            self._norm(patches, tower.input_norm, patches)
            self._place(grid, patches)
        if tower.class_token is not None:
            hidden[grid.count :] = self._vector(tower.class_token)
            if self._positions is not None:
                hidden[grid.count :] += self._positions[0]

    def _colours(self, grid: Grid) -> torch.Tensor:
        """Of all patches in the grid's order, as `images.prepare.patches_of` makes them."""
        size, (rows, columns) = self.tower.patch_size, (grid.rows, grid.columns)
        pixels = self._pixels[: grid.count * 3 * size**2].view(rows, size, columns, size, 3).transpose(1, 2)
        places = pixels + torch.arange(0, 3 * 256, 256, dtype=torch.int32, device=self._device)
        if not self.tower.by_pixel:
            places = places.permute(0, 1, 4, 2, 3)
        colours = self._shades.index_select(0, places.reshape(-1)).view(grid.count, 3, 1, -1)
        frames = self.tower.patches[0].in_features // (3 * size**2)
        colours = colours.expand(-1, -1, frames, -1).reshape(grid.count, -1)
        return colours if grid.order is None else colours[grid.order]

    def _place(self, grid: Grid, hidden: torch.Tensor) -> None:
        """Add what the tower adds to patches by their place."""
        if self._positions is None:
            return
        if self.tower.by_axis:
            side = self.tower.side
            places = self._positions[: grid.columns] + self._positions[side : side + grid.rows, None]
        elif grid.shares is None:
            places = self._positions[self._others : self._others + grid.count]
        else:
            rows, columns = grid.shares
            down = (rows @ self._positions.view(self.tower.side, -1)).view(grid.rows, self.tower.side, -1)
            places = torch.matmul(columns, down)
        places = places.view_as(hidden)
        hidden += places if grid.order is None else places[grid.order]

    def _multiplied(self, x: torch.Tensor, *group: Linear, within: _Bounds | None = None) -> _Sums:
        """Of what was kept `within` bounds already."""
        weights, first = self._weights[group], 0
        out = self._sums[: len(x) * len(weights.values)].view(len(x), -1)
        for count, bounds in weights.reads:
            part, of = out[:, first : first + count], weights.values[first : first + count]
            read = x if bounds is None or bounds == within else x.clamp(*bounds)
            torch.addmm(part, read, of.t(), beta=0.0, alpha=self._factor, out=part)
            first += count
        return _Sums(out, weights.bias, weights.given)

    def _beside(self, sums: _Sums, places: int, within: _Bounds | None) -> tuple[torch.Tensor, Any]:
        """What kernels add to sums of so many matrices, or their bounds and those of what becomes of them; the second
        is how they take it.
        """
        if not sums.bounds and within is None:
            return (self._none, False) if sums.bias is None else (sums.bias, True)
        bounds = (*(sums.bounds or (ANY,) * places), within or ANY)
        if bounds not in self._tables:
            self._tables[bounds] = self._sent(np.array(bounds, np.float32))
        return self._tables[bounds], BOUNDS.value

    def _norm(
        self, source: torch.Tensor, norm: Norm | None, out: torch.Tensor | None,
        added: tuple[_Sums, Join] | None = None, within: _Bounds | None = None,
    ) -> None:  # fmt: skip
        """out = norm(source), float32 [rows, width], to which a product is added first, as its join says."""
        cut, none, (rows, width) = whole_width(source.shape[1]), self._none, source.shape
        sums, join = (_Sums(none, None), _ADDED) if added is None else added
        factor = 1.0 if join.output_scale is None else float(self._tensors.vector(join.output_scale)[0])
        target, stride, stored = (none, 0, formats.NOTHING) if out is None else (out, out.stride(0), formats.PLAIN)
        beside, how = self._beside(sums, 1, within)
        normalize[(rows,)](
            sums.values, 0, width, beside, none, *self._norm_arguments(join.norm),
            float(join.scale), factor, source, *self._norm_arguments(norm), target, stride, none, none, none, width,
            none, SPLITS=0 if added is None else 1, MATMUL_BIAS=how, GATHER=False,
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

    def _attended(self, sums: _Sums, attention: Attention, grid: Grid) -> Generator[float, None, torch.Tensor]:
        """Attention's results, [tokens, heads * head_size]; some heads after others where there are many tokens."""
        heads, kv_heads, size, rope = attention.num_heads, attention.num_kv_heads, attention.head_size, attention.rope
        count, most, none = grid.count + self._others, self.tower.max_tokens, self._none
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
        parts, warps = _ROTATED
        beside, how = self._beside(sums, 3, None)
        rotate[(count, -(-(heads + 2 * kv_heads) // parts))](
            sums.values, 0, sums.values.stride(0), beside, self._places, cosine, sine, none, query_norm, key_norm,
            query_bias, key_bias, eps, float(attention.v_norm_eps or 0.0), heads * size, (heads + kv_heads) * size,
            keys, values, none, none, self._places, query, heads * size, SPLITS=1, BIAS=how, HEADS=heads,
            KV_HEADS=kv_heads, HEAD=size, ROTARY=rope.size if rope else 0,
            INTERLEAVED=bool(rope and rope.pairing == "interleaved"), NORM=NORM_KINDS[norm.kind] if norm else 0,
            NORM_BIAS=bool(norm and norm.bias), VALUE_NORM=attention.v_norm_eps is not None, GROWTH=False, STORED=False,
            PADDED_HEAD=padded_head(attention), BLOCK_SIZE=most, INT8=False, DEPENDENT=False, PARTS=parts,
            num_warps=warps,
        )  # fmt: skip
        group, begun = heads // kv_heads, 0
        found = torch.empty((count, heads, size), dtype=self._compute, device=self._device)
        for windows, tokens in ((1, count),) if attention.window is None else grid.windows:
            of, work = slice(begun, begun + windows * tokens), 4.0 * windows * tokens**2 * size
            read = query[of].view(windows, tokens, heads, size).transpose(1, 2)
            seen, added = (each[:, of].view(kv_heads, windows, tokens, size).transpose(0, 1) for each in (keys, values))
            out = found[of].view(windows, tokens, heads, size).transpose(1, 2)
            step = max(int(_MOST_AT_ONCE / (work * group)), 1)
            for first in range(0, kv_heads, step):
                own, with_keys = slice(first * group, (first + step) * group), slice(first, first + step)
                yield attention_s(work * len(range(*own.indices(heads))))
                part = functional.scaled_dot_product_attention(
                    read[:, own], seen[:, with_keys], added[:, with_keys], scale=attention.scale, enable_gqa=group > 1
                )
                if part.numel() == found.numel():  # all of them, as torch has them
                    return part.transpose(1, 2).reshape(count, -1)
                out[:, own] = part
            begun += windows * tokens
        return found.view(count, -1)

    def _activated(
        self, sums: _Sums, activation: Activation | None, width: int, out: torch.Tensor | None = None, *, gated: bool,
        within: _Bounds | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """activation(gate) * up, or activation(up), of `width` columns, within bounds; None is no activation."""
        rows, none = len(sums.values), self._none
        if out is None:
            out = self._inner[: rows * width].view(rows, width)
        cut, (beside, how) = activation_blocks(width, rows), self._beside(sums, 1 + gated, within)
        activate[(rows, cut.blocks)](
            sums.values, 0, sums.values.stride(0), beside, width if gated else 0,
            width, out, out.stride(0), none, none, none, none, none, SPLITS=1, BIAS=how,
            KIND=NO_ACTIVATION.value if activation is None else ACTIVATIONS[activation], GATED=gated, INTERLEAVED=False,
            FORMAT=formats.PLAIN.value, BLOCK_TOKENS=1, CHUNKS=1, DEPENDENT=False, BLOCK=cut.block,
            num_warps=cut.warps,
        )  # fmt: skip
        return out

    def _project(
        self, place: int, patches: torch.Tensor, grid: Grid, features: torch.Tensor
    ) -> Generator[float, None, None]:
        """Write the features of the projector of a place; its patches are float32 where it has a norm or a standard."""
        projector, tower = self.tower.projectors[place], self.tower
        before = sum(each.num_features for each in tower.projectors[:place])
        out = features[:, before : before + projector.num_features]
        patches = patches if grid.back is None else patches[grid.back]
        x = squares_of(patches.view(grid.rows, grid.columns, -1), tower.merge, projector)
        if projector.standard is not None:
            x = self._standardized(x, projector.standard).to(self._compute)
        if projector.norm is not None:
            normed = self._normed[: x.numel()].view_as(x)
            self._norm(x, projector.norm, normed)
            x = normed
        if projector.reduction is not None:
            yield matmuls_s(len(x), projector.reduction)
            x = self._activated(
                self._multiplied(x, projector.reduction), None, projector.reduction.out_features, gated=False
            )
        yield matmuls_s(len(x), projector.first)
        sums, second = self._multiplied(x, projector.first), projector.second
        if second is not None:
            if projector.inner_norm is not None:
                normed = torch.zeros((len(x), projector.first.out_features), device=self._device)
                self._norm(normed, projector.inner_norm, normed, (sums, _ADDED))
                sums = _Sums(normed, None)
            x = self._activated(sums, projector.activation, projector.first.out_features, gated=False)
            if isinstance(second, FeedForward):
                yield matmuls_s(len(x), *second.linears()[:-1])
                sums = self._multiplied(x, *second.linears()[:-1])
                x = self._activated(sums, second.activation, second.down.in_features, gated=second.gate is not None)
                second = second.down
            yield matmuls_s(len(x), second)
            sums = self._multiplied(x, second)
        self._activated(sums, None, projector.num_features, out, gated=False)

    def _standardized(self, x: torch.Tensor, standard: Standard) -> torch.Tensor:
        y = x * standard.scale
        if standard.shift is not None:
            y -= self._vector(standard.shift)
        if standard.factor is not None:
            y *= self._vector(standard.factor)
        return y / (y.square().mean(dim=1, keepdim=True) + standard.eps).sqrt()


_ADDED = Join(None, None, 1.0)
"""How a product is added to the stream where no block says otherwise."""
