"""Raw ggml blocks to fragment order on the device: uploaded through pinned memory, repacked by a kernel there.

The result is the same bytes as `pack_fragments` of the blocks' `Planes`; types that the kernel does not know go that
way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.layouts.fragments import BLOCK, FragmentFormat, fragment_format, pack_fragments
from realizar.backends.cuda.native.compiler import architecture, compile_source
from realizar.backends.cuda.native.launcher import Kernel
from realizar.backends.cuda.native.sources import REPACKED_TYPES, repack_source
from realizar.backends.cuda.weights.pack import PackedMatrix, codebook_table, strip_places
from realizar.backends.cuda.weights.store import aligned
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization import to_planes

_PIECE_BYTES = 32 << 20
_PIECE_ROWS = 4 * BLOCK  # packed by one thread at a time


@dataclass(frozen=True, slots=True)
class RawMatrix:
    """A quantised matrix as it lies in its file.

    Attributes:
        ggml_type: its type.
        data: uint8 [size in bytes], contiguous, rows one after another.
        rows, cols: its shape.
    """

    ggml_type: GGMLType
    data: NDArray[np.uint8]
    rows: int
    cols: int


_Piece: TypeAlias = tuple[RawMatrix, int, torch.Tensor, torch.Tensor]  # its first row; where strips and scales land


def raw_format(matrix: RawMatrix) -> FragmentFormat:
    """The format that a matrix is packed in, from its type alone.

    Raises:
        UnsupportedModelError: the type has no format.
    """
    size = matrix.ggml_type.type_size
    return fragment_format(to_planes(matrix.ggml_type, np.zeros(size, np.uint8), 1, matrix.ggml_type.block_size))


def memory_bytes(parts: Sequence[RawMatrix]) -> int:
    """Bytes that matrices which lie one below the other take on the device, their block scales included.

    Raises:
        UnsupportedModelError: their type has no format.
    """
    return _memory_bytes(raw_format(parts[0]), sum(part.rows for part in parts), parts[0].cols)


def _memory_bytes(form: FragmentFormat, rows: int, cols: int) -> int:
    return aligned(form.size_bytes(rows, cols)) + 4 * -(-rows // BLOCK)


def pack_by_threads(
    parts: Sequence[RawMatrix], device: torch.device | str, into: torch.Tensor | None = None,
    uploaded: Callable[[int], None] | None = None, interleaved: bool = False,
) -> PackedMatrix:  # fmt: skip
    """What `Packer.pack` gives, from `Planes` of some strips at a time, by a thread for each core."""
    first, form = parts[0], raw_format(parts[0])
    rows = sum(part.rows for part in parts)
    weights, scales = _allocate(form, rows, first.cols, device, into)
    strips, places = weights.view(len(scales), -1), strip_places([part.rows for part in parts], interleaved)
    pieces = [
        (part, start, strips[place][start // BLOCK :], scales[place][start // BLOCK :])
        for part, place in zip(parts, places, strict=True)
        for start in range(0, part.rows, _PIECE_ROWS)
    ]

    def pack_piece(piece: _Piece) -> tuple[NDArray[np.uint8], NDArray[np.float32], int]:
        part, start, *_ = piece
        count, row_bytes = min(_PIECE_ROWS, part.rows - start), part.data.size // part.rows
        data = part.data[start * row_bytes : (start + count) * row_bytes]
        return *pack_fragments(to_planes(part.ggml_type, data, count, part.cols), form), data.size

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        packed = pool.map(pack_piece, pieces)
        for (_, _, to, to_scales), (data, block_scales, size) in zip(pieces, packed, strict=True):
            to[: block_scales.size].copy_(torch.from_numpy(data).view(block_scales.size, -1))
            to_scales[: block_scales.size].copy_(torch.from_numpy(block_scales))
            if uploaded is not None:
                uploaded(size)
    return PackedMatrix(rows, first.cols, form, weights, scales, _table_of(first, device), interleaved)


def _allocate(
    form: FragmentFormat, rows: int, cols: int, device: torch.device | str, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for weights and block scales, one behind the other."""
    if into is None:
        into = torch.empty(_memory_bytes(form, rows, cols), dtype=torch.uint8, device=device)
    return into[: form.size_bytes(rows, cols)], into[aligned(form.size_bytes(rows, cols)) :].view(torch.float32)


def _table_of(matrix: RawMatrix, device: torch.device | str) -> torch.Tensor | None:
    """The codebook of a matrix's type on the device, or None."""
    block = matrix.data[: matrix.ggml_type.type_size]
    book = codebook_table(to_planes(matrix.ggml_type, block, 1, matrix.ggml_type.block_size))
    return None if book is None else torch.from_numpy(book).to(device)


class Packer:
    """Packs matrices on one device; owns two pinned buffers and their copies there until it is dropped."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._arch = architecture(torch.cuda.get_device_capability(self.device))
        self._kernels: dict[GGMLType, tuple[Kernel, Kernel]] = {}
        pinned = [torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._staged = [(host, torch.empty_like(host, device=self.device), torch.cuda.Event()) for host in pinned]
        self._turn = 0

    def pack(
        self, parts: Sequence[RawMatrix], into: torch.Tensor | None = None,
        uploaded: Callable[[int], None] | None = None, interleaved: bool = False,
    ) -> PackedMatrix:  # fmt: skip
        """Pack one matrix, or several of one type one below the other or interleaved.

        Args:
            parts: matrices of one type and width; all but the last have a multiple of 64 rows.
            into: uint8 [memory_bytes(parts)], 256-byte aligned, for weights and block scales; allocated if None.
            uploaded: called with the number of raw bytes of each piece that is on its way.
            interleaved: whether 64 rows of each of two matrices take turns.

        Raises:
            UnsupportedModelError: the parts can't lie in one matrix, or their type has no format.
        """
        first = parts[0]
        if len({(part.ggml_type, part.cols) for part in parts}) != 1 or any(p.rows % BLOCK for p in parts[:-1]):
            raise UnsupportedModelError(f"matrices merge if of one type and width and at multiples of {BLOCK} rows")
        if first.ggml_type not in REPACKED_TYPES or first.cols % BLOCK:
            return pack_by_threads(parts, self.device, into, uploaded, interleaved)
        form = raw_format(first)
        rows = sum(part.rows for part in parts)
        weights, scales = _allocate(form, rows, first.cols, self.device, into)
        for part, place in zip(parts, strip_places([part.rows for part in parts], interleaved), strict=True):
            self._pack_part(part, form, weights, scales, place, uploaded)
        return PackedMatrix(rows, first.cols, form, weights, scales, _table_of(first, self.device), interleaved)

    def _pack_part(
        self, part: RawMatrix, form: FragmentFormat, weights: torch.Tensor, scales: torch.Tensor, place: slice,
        uploaded: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """Pack a matrix; its strips land at `place`."""
        tops_kernel, pack_kernel = self._load(part.ggml_type, form)
        row_bytes = part.data.size // part.rows
        step = max(1, _PIECE_BYTES // (row_bytes * BLOCK)) * BLOCK
        chunks = form.chunks(part.cols)
        stream = torch.cuda.current_stream(self.device)
        for start in range(0, part.rows, step):
            rows = min(step, part.rows - start)
            piece = part.data[start * row_bytes : (start + rows) * row_bytes]
            raw, event = self._upload(piece, stream)
            strips = -(-rows // BLOCK)
            tops = torch.zeros((strips, 2), dtype=torch.int32, device=self.device)
            shape = [rows, part.cols]
            tops_kernel.launch(
                (4, strips, 1), 256, [raw.data_ptr(), tops.data_ptr(), *shape], "ppii", stream.cuda_stream, False
            )
            strip = place.start + start // BLOCK * place.step
            to = weights.data_ptr() + strip * form.strip_bytes(part.cols)
            arguments = [raw.data_ptr(), tops.data_ptr(), to, scales.data_ptr() + 4 * strip, *shape, chunks, place.step]
            pack_kernel.launch((chunks, strips, 1), 128, arguments, "ppppiiii", stream.cuda_stream, False)
            event.record(stream)
            if uploaded is not None:
                uploaded(piece.size)

    def _upload(self, piece: NDArray[np.uint8], stream: torch.cuda.Stream) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Start a copy to the device; the event must be recorded after the last use of the copy."""
        self._turn ^= 1
        host, copy, event = self._staged[self._turn]
        event.synchronize()
        if piece.size > host.numel():
            return torch.from_numpy(np.ascontiguousarray(piece)).to(self.device), event
        host.numpy()[: piece.size] = piece
        copy[: piece.size].copy_(host[: piece.size], non_blocking=True)
        return copy, event

    def _load(self, ggml_type: GGMLType, form: FragmentFormat) -> tuple[Kernel, Kernel]:
        if ggml_type not in self._kernels:
            cubin = compile_source(repack_source(ggml_type, form), self._arch)
            self._kernels[ggml_type] = (Kernel(cubin, "scale_tops", 0), Kernel(cubin, "pack_blocks", 0))
        return self._kernels[ggml_type]
