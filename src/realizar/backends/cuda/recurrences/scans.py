"""Starts of Hopper's kernels for chunks of gated delta nets; steps have none of them yet (docs/log/cuda-engine.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from realizar.backends.cuda.native.launcher import LoadedKernels
from realizar.backends.cuda.native.scans.source import SCAN_HEAD, THREADS, ScanKernels


@dataclass(frozen=True, slots=True)
class ScannedChunks:
    """What Hopper's kernels read and write, and how many tiles and rows they have, those that are none included.

    Attributes:
        partials: float32 [splits, tokens, width], with `bias`, float32 [width], or None: a net's inputs.
        rings, kernel, decay_bias, rate: float32, as `recur` takes them.
        recurring, tile_rows, tile_firsts, scanned: int32, as `RecurringRows` fills them; the last number of a row of
            `recurring` is the row's first tile.
        scratch: bytes that the kernels hand on: `mixed`, `links` and `factors` of tiles.cu.
        states: float32 [slots, value heads, key size, value size]. output: float32 [tokens, columns].
    """

    partials: torch.Tensor
    bias: torch.Tensor | None
    rings: torch.Tensor
    kernel: torch.Tensor
    decay_bias: torch.Tensor
    rate: torch.Tensor
    recurring: torch.Tensor
    tile_rows: torch.Tensor
    tile_firsts: torch.Tensor
    scanned: torch.Tensor
    scratch: tuple[torch.Tensor, ...]
    states: torch.Tensor
    output: torch.Tensor
    tiles: int
    rows: int


class HopperScan:
    """Starts the kernels of a net's shape."""

    def __init__(self, shape: ScanKernels, loaded: LoadedKernels) -> None:
        self._shape, self._loaded = shape, loaded
        self.sources = shape.sources()

    def launches(
        self, on: ScannedChunks, scale: float, stream: int, dependent: bool
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each kernel's name and start, in order. Raises KernelError where one is compiled now, and does not."""
        shape = self._shape
        sums = [on.partials.shape[0], on.partials.stride(0), on.partials.stride(1)]
        bias = 0 if on.bias is None else on.bias.data_ptr()
        tiles, (mixed, links, factors) = [on.recurring, on.tile_rows, on.tile_firsts], on.scratch
        heads, blocks = 2 * shape.key_heads + shape.value_heads, shape.value_heads * SCAN_HEAD // 64
        of_inputs = [on.partials, bias, on.rings, on.kernel, *tiles, mixed, scale, *sums]
        of_prepare = [on.partials, bias, on.decay_bias, on.rate, *tiles, mixed, links, factors, *sums]
        of_states = [on.recurring, on.scanned, mixed, links, factors, on.states, on.output, on.output.stride(0)]
        for name, grid, arguments, sizes in (
            ("inputs", (heads, on.tiles, 1), of_inputs, "ppppppppfiii"),
            ("prepare", (shape.value_heads, on.tiles, 1), of_prepare, "ppppppppppiii"),
            ("states", (blocks, on.rows, 1), of_states, "pppppppi"),
        ):
            values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
            start = self._loaded[self.sources[name]].launch
            yield name, partial(start, grid, THREADS[name], values, sizes, stream, dependent)
