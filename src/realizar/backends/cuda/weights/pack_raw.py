"""Matrices to fragment order on the device.

Raw blocks whose layout `repack.cu` knows are uploaded through pinned memory and repacked by a kernel there, e4m3, bf16
and fp16 by torch. The result is the same bytes as `pack_fragments` of the source's `Planes`, which all other layouts
are packed from, by threads, or as `fragment_floats`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.layouts.fragments import (
    BLOCK,
    FLOATS,
    ORDER,
    FragmentFormat,
    fragment_floats,
    fragment_format,
    pack_fragments,
    strip_axes,
)
from realizar.backends.cuda.native.compiler import architecture, compile_source
from realizar.backends.cuda.native.launcher import Kernel
from realizar.backends.cuda.native.raw_layouts import REPACKED_LAYOUTS
from realizar.backends.cuda.native.sources import repack_source
from realizar.backends.cuda.weights.pack import PackedMatrix, codebook_table, strip_places
from realizar.backends.cuda.weights.store import aligned
from realizar.backends.machine import num_processors
from realizar.errors import UnsupportedModelError
from realizar.quantization.layout import FloatType, WeightLayout
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

_PIECE_BYTES = 32 << 20
_COPIED_BYTES = 2 << 20  # by a thread at a time
_RUN_OUT_FEATURES = 4 * BLOCK  # packed by one thread at a time


_Run: TypeAlias = tuple[MatrixSource, int, torch.Tensor, torch.Tensor]
"""A matrix, the first out_feature of the run, and where its strips and scales land."""


def memory_bytes(parts: Sequence[MatrixSource]) -> int:
    """Bytes that matrices which lie one below the other take on the device, their block scales included.

    Raises UnsupportedModelError where no format expresses their layout.
    """
    out_features = sum(part.out_features for part in parts)
    size = fragment_format(parts[0].layout).size_bytes(out_features, parts[0].in_features)
    return aligned(size) + 4 * -(-out_features // BLOCK)


def reserve(
    parts: Sequence[MatrixSource], device: torch.device | str, into: torch.Tensor | None = None,
    interleaved: bool = False,
) -> PackedMatrix:  # fmt: skip
    """A matrix that has memory, and no weights yet. Arguments as in `Packer.pack`."""
    weight_format, cols = fragment_format(parts[0].layout), parts[0].in_features
    out_features = sum(part.out_features for part in parts)
    size = weight_format.size_bytes(out_features, cols)
    memory = torch.empty(memory_bytes(parts), dtype=torch.uint8, device=device) if into is None else into
    scales, table = memory[aligned(size) :].view(torch.float32), table_of(parts[0].layout, device)
    return PackedMatrix(out_features, cols, weight_format, memory[:size], scales, table, interleaved)


def pack_by_threads(
    parts: Sequence[MatrixSource], device: torch.device | str, into: PackedMatrix | torch.Tensor | None = None,
    interleaved: bool = False,
) -> PackedMatrix:  # fmt: skip
    """The result of `Packer.pack`, made on the host from `Planes` of some strips at a time, a thread for each core."""
    _check_alike(parts)
    matrix = into if isinstance(into, PackedMatrix) else reserve(parts, device, into, interleaved)
    weights, scales, weight_format = matrix.weights, matrix.block_scales, matrix.format
    counts = [part.out_features for part in parts]
    strips, places = weights.view(len(scales), -1), strip_places(counts, matrix.interleaved)
    runs = [
        (part, start, strips[place][start // BLOCK :], scales[place][start // BLOCK :])
        for part, place in zip(parts, places, strict=True)
        for start in range(0, part.out_features, _RUN_OUT_FEATURES)
    ]

    def pack_run(run: _Run) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        part, start, *_ = run
        stop = min(start + _RUN_OUT_FEATURES, part.out_features)
        if weight_format.is_float:
            return fragment_floats(part.read(start, stop))
        return pack_fragments(part.planes(start, stop), weight_format)

    with ThreadPoolExecutor(num_processors()) as pool:
        packed = pool.map(pack_run, runs)
        for (_, _, to, to_scales), (data, block_scales) in zip(runs, packed, strict=True):
            to[: block_scales.size].copy_(torch.from_numpy(data).view(block_scales.size, -1))
            to_scales[: block_scales.size].copy_(torch.from_numpy(block_scales))
    return matrix


def _check_alike(parts: Sequence[MatrixSource]) -> None:
    """Raise UnsupportedModelError for parts that can't lie in one matrix."""
    alike = len({(part.layout, part.in_features) for part in parts}) == 1
    if not alike or any(part.out_features % BLOCK for part in parts[:-1]):
        raise UnsupportedModelError(
            f"matrices merge if of one layout and width and at multiples of {BLOCK} output features"
        )


def table_of(layout: WeightLayout, device: torch.device | str) -> torch.Tensor | None:
    """The codebook of a layout that is packed, where kernels read it."""
    book = codebook_table(layout) if fragment_format(layout).reads_table else None
    return None if book is None else torch.from_numpy(book).to(device)


def _copied_at_once(parts: Sequence[MatrixSource], most: int) -> Iterator[list[Planes]]:
    """Planes of matrices one below the other, of up to `most` out_features together, a multiple of 64."""
    planes: list[Planes] = []
    room = most
    for part in parts:
        start = 0
        while start < part.out_features:
            stop = min(start + room, part.out_features)
            planes.append(part.planes(start, stop))
            room, start = room - (stop - start), stop
            if not room:
                yield planes
                planes, room = [], most
    if planes:
        yield planes


def _copy_by_threads(runs: Sequence[NDArray[Any]], to: NDArray[np.uint8]) -> None:
    """Copy rows from a file's pages, at which one thread waits several times as long as the bus takes for them."""
    copies: list[tuple[NDArray[np.uint8], NDArray[Any]]] = []
    end = 0
    for run in runs:
        step = max(1, _COPIED_BYTES // max(1, run.shape[1]))
        for first in range(0, len(run), step):
            part = run[first : first + step]
            copies.append((to[end : end + part.size].reshape(part.shape), part))
            end += part.size
    list(_copying().map(lambda copy: np.copyto(copy[0], copy[1], casting="unsafe"), copies))


@cache
def _copying() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(16, num_processors()), "realizar-copy")


class Reserver:
    """Makes the matrices that `Packer` does, and packs nothing into them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pack(
        self, parts: Sequence[MatrixSource], into: PackedMatrix | torch.Tensor | None = None, interleaved: bool = False
    ) -> PackedMatrix:
        """Arguments as of `Packer.pack`."""
        return into if isinstance(into, PackedMatrix) else reserve(parts, self._device, into, interleaved)


class Packer:
    """Packs matrices on one device; owns two pinned buffers and their copies there until it is dropped.

    A `repacks` of False leaves raw blocks to the host's threads.
    """

    def __init__(self, device: torch.device | str, *, repacks: bool = True) -> None:
        self.device, self._repacks = torch.device(device), repacks
        self._arch = architecture(torch.cuda.get_device_capability(self.device))
        self._kernels: dict[WeightLayout, tuple[Kernel, Kernel]] = {}
        pinned = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._staged = [(host, torch.empty_like(host, device=self.device), torch.cuda.Event()) for host in pinned]
        self._staging = 0

    def pack(
        self, parts: Sequence[MatrixSource], into: PackedMatrix | torch.Tensor | None = None, interleaved: bool = False,
    ) -> PackedMatrix:  # fmt: skip
        """Pack one matrix, or several of one layout one below the other or interleaved.

        Args:
            parts: matrices of one layout and width; all but the last have a multiple of 64 out_features.
            into: memory for weights and block scales, 256-byte aligned: uint8 [memory_bytes(parts)], or a matrix that
                has it; allocated if None.
            interleaved: blocks of 64 out_features of two matrices alternate, then of the next two.

        Raises:
            UnsupportedModelError: the parts can't lie in one matrix, or no format expresses their layout.
        """
        first = parts[0]
        _check_alike(parts)
        weight_format, cols = fragment_format(first.layout), first.in_features
        if weight_format.e4m3 and self._repacks:
            return self._pack_e4m3(parts, into, interleaved)
        known = weight_format.is_float or (self._repacks and first.layout in REPACKED_LAYOUTS and cols % BLOCK == 0)
        raws = [part.raw for part in parts if part.raw is not None]
        if not known or len(raws) < len(parts):
            return pack_by_threads(parts, self.device, into, interleaved)
        matrix = into if isinstance(into, PackedMatrix) else reserve(parts, self.device, into, interleaved)
        weights, scales = matrix.weights, matrix.block_scales
        places = strip_places([part.out_features for part in parts], matrix.interleaved)
        for raw, place in zip(raws, places, strict=True):
            if (kind := first.layout.float_type) is not None:
                strips = weights.view(len(scales), -1)[place]
                self._pack_floats(raw, FLOAT_TYPES[kind], strips, scales[place])
            else:
                self._pack_part(raw, first.layout, cols, weights, scales, place)
        return matrix

    def _pack_e4m3(
        self, parts: Sequence[MatrixSource], into: PackedMatrix | torch.Tensor | None, interleaved: bool
    ) -> PackedMatrix:
        matrix = into if isinstance(into, PackedMatrix) else reserve(parts, self.device, into, interleaved)
        strips, scales = matrix.weights.view(len(matrix.block_scales), -1), matrix.block_scales
        strip_places([each.out_features for each in parts], matrix.interleaved)  # refuses what can't alternate
        most = max(1, _PIECE_BYTES // (matrix.in_features * BLOCK)) * BLOCK
        step, stream = 2 if matrix.interleaved else 1, torch.cuda.current_stream(self.device)
        for number in range(step):
            own, own_scales, first = strips[number::step], scales[number::step], 0
            for planes in _copied_at_once(parts[number::step], most):
                codes, event = self._upload([each.codes for each in planes], stream)
                of_groups = torch.from_numpy(np.concatenate([each.scales for each in planes])).to(self.device)
                out_features = len(of_groups)
                rows = codes.reshape(-1)[: sum(each.codes.size for each in planes)].view(out_features, -1)
                end = first + -(-out_features // BLOCK)
                reorder_e4m3(rows, of_groups, matrix.format, own[first:end], own_scales[first:end])
                first = end
                event.record(stream)
        return matrix

    def _pack_floats(
        self, raw: NDArray[np.uint8], dtype: torch.dtype, weights: torch.Tensor, scales: torch.Tensor,
    ) -> None:  # fmt: skip
        step = max(1, _PIECE_BYTES // (raw.shape[1] * BLOCK)) * BLOCK
        stream = torch.cuda.current_stream(self.device)
        for start in range(0, len(raw), step):
            run = raw[start : start + step]
            copy, event = self._upload([run], stream)
            place = slice(start // BLOCK, -(-(start + len(run)) // BLOCK))
            reorder_floats(copy.reshape(-1)[: run.size].view(dtype).view(len(run), -1), weights[place], scales[place])
            event.record(stream)

    def _pack_part(
        self, raw: NDArray[np.uint8], layout: WeightLayout, cols: int, weights: torch.Tensor, scales: torch.Tensor,
        place: slice,
    ) -> None:  # fmt: skip
        weight_format = fragment_format(layout)
        tops_kernel, pack_kernel = self._load(layout, weight_format)
        step = max(1, _PIECE_BYTES // (raw.shape[1] * BLOCK)) * BLOCK
        chunks = weight_format.chunks(cols)
        stream = torch.cuda.current_stream(self.device)
        for start in range(0, len(raw), step):
            out_features = min(step, len(raw) - start)
            run = raw[start : start + out_features]
            blocks, event = self._upload([run], stream)
            strips = -(-out_features // BLOCK)
            tops = torch.zeros((strips, 2), dtype=torch.int32, device=self.device)
            shape = [out_features, cols]
            tops_kernel.launch(
                (4, strips, 1), 256, [blocks.data_ptr(), tops.data_ptr(), *shape], "ppii", stream.cuda_stream, False
            )
            strip = place.start + start // BLOCK * place.step
            to = weights.data_ptr() + strip * weight_format.strip_bytes(cols)
            target = to, scales.data_ptr() + 4 * strip
            arguments = [blocks.data_ptr(), tops.data_ptr(), *target, *shape, chunks, place.step]
            pack_kernel.launch((chunks, strips, 1), 128, arguments, "ppppiiii", stream.cuda_stream, False)
            event.record(stream)

    def _upload(self, runs: Sequence[NDArray[Any]], stream: torch.cuda.Stream) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start a copy of out_features, of a run behind those before it, to the device; the event must be recorded
        after the last use of the copy.
        """
        self._staging ^= 1
        host, copy, event = self._staged[self._staging]
        event.synchronize()
        size = sum(run.size for run in runs)
        if size > host.numel():
            return torch.from_numpy(np.concatenate(runs)).to(self.device), event
        _copy_by_threads(runs, host.numpy())
        copy[:size].copy_(host[:size], non_blocking=True)
        return copy, event

    def _load(self, layout: WeightLayout, weight_format: FragmentFormat) -> tuple[Kernel, Kernel]:
        if layout not in self._kernels:
            source = repack_source(layout, weight_format)
            cubin = compile_source(source, self._arch)
            tops, blocks = (Kernel(cubin, name, 0, source.name) for name in ("scale_tops", "pack_blocks"))
            self._kernels[layout] = tops, blocks
        return self._kernels[layout]


FLOAT_TYPES: dict[FloatType, torch.dtype] = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def reorder_floats(values: torch.Tensor, weights: torch.Tensor, block_scales: torch.Tensor) -> None:
    """Write some strips of a matrix, bf16 or fp16 [out_features, cols].

    `weights` are uint8 [ceil(out_features / 64), FLOATS.strip_bytes(cols)], whose strips may lie apart, `block_scales`
    float32 [ceil(out_features / 64)].
    """
    (out_features, cols), strips = values.shape, len(weights)
    chunks = FLOATS.chunks(cols)
    padded = torch.zeros((strips * BLOCK, chunks * BLOCK), device=values.device)
    padded[:out_features, :cols].copy_(values)
    flat = padded.view(strips, -1)
    tops = flat.abs().amax(dim=1)
    exponents = torch.where(tops > 0, 15 - torch.frexp(tops).exponent, 0).clamp(-100, 100)
    ones = torch.ones_like(tops)
    halves = flat.mul_(torch.ldexp(ones, exponents)[:, None]).half()
    ordered = halves.view(strip_axes(strips, chunks)).permute(ORDER).contiguous()
    weights.copy_(ordered.view(strips, -1).view(torch.uint8))
    block_scales.copy_(torch.ldexp(ones, -exponents))


def reorder_e4m3(
    codes: torch.Tensor, scales: torch.Tensor, weight_format: FragmentFormat, weights: torch.Tensor,
    block_scales: torch.Tensor,
) -> None:  # fmt: skip
    """Write some strips of a matrix of e4m3, with the same bytes as `pack_fragments`.

    Args:
        codes: uint8 [out_features, cols].
        scales: float32 [out_features, cols / group].
        weights: uint8 [ceil(out_features / 64), weight_format.strip_bytes(cols)], whose strips may lie apart.
        block_scales: float32 [ceil(out_features / 64)].
    """
    (out_features, cols), strips, sets = codes.shape, len(weights), weight_format.sets
    chunks = weight_format.chunks(cols)
    of_sets = scales.repeat_interleave(max(1, cols // scales.shape[1] // BLOCK), dim=1)
    rows, missing = strips * BLOCK - out_features, chunks * BLOCK - cols
    if rows or missing:
        codes = torch.nn.functional.pad(codes, (0, missing, 0, rows))
        of_sets = torch.nn.functional.pad(of_sets, (0, chunks * sets - of_sets.shape[1], 0, rows))
    tops = of_sets.reshape(strips, -1).abs().amax(dim=1)
    largest = torch.where(tops > 0, torch.frexp(tops).exponent, -200)
    shift = 24 - weight_format.positions[0]
    exponents = (15 - shift - largest).clamp(-100, 100)
    blocks = weights.unflatten(1, (chunks, weight_format.block_bytes))
    written, stored = blocks.split([weight_format.codes_bytes, 4 * weight_format.tile_scale_bytes], dim=2)
    # A lane's 16 columns lie side by side, and so do those of the four lanes of an out_feature.
    written.unflatten(2, (4, 2, 8, BLOCK)).copy_(codes.view(strips, 4, 2, 8, chunks, BLOCK).permute(0, 4, 1, 2, 3, 5))
    halves = (of_sets.view(strips, -1) * _powers(exponents + shift)[:, None]).half()
    ordered = halves.view(strips, 4, 2, 8, chunks, sets).permute(0, 4, 1, 5, 3, 2).contiguous()
    stored.copy_(ordered.view(strips, chunks, -1).view(torch.uint8))
    block_scales.copy_(_powers(-exponents))


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """Two to exponents between -126 and 127, exact: float32."""
    return ((exponents.int() + 127) << 23).view(torch.float32)
