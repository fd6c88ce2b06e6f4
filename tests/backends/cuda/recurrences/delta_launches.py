"""The kernels of gated delta nets over the rows of a step, on the CPU under the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from backends.cuda.recurrences.delta_cases import Net
from realizar.backends.cuda.kernels.gate_heads import keep_inputs
from realizar.backends.cuda.kernels.recurrences.delta_decode import recur_once
from realizar.backends.cuda.kernels.recurrences.delta_inputs import padded
from realizar.backends.cuda.kernels.recurrences.delta_net import recur
from realizar.backends.cuda.kernels.recurrences.delta_scan import TILE, scan_inputs, scan_prepare, scan_states
from realizar.backends.cuda.matmul.inputs import ActivationBuffer, ActivationBuffers, InputFormat
from realizar.backends.cuda.native.launcher import LoadedKernels
from realizar.backends.cuda.native.scans.source import FACTOR_BYTES, LINK_BYTES, ScanKernels
from realizar.backends.cuda.recurrences.scans import DecodedRows, HopperRows, HopperScan, ScannedChunks

NORM_EPS = 1e-6
HOPPER = "halves"  # a precision: that of the kernels in CUDA C++, of heads of 128
_BLOCKS = 3  # of the kernel for rows of one token: each has several heads
_FACTOR = 0.25  # of what it gates


@dataclass
class Row:
    """A row of a step; `position` tokens come before its inputs."""

    slot: int
    inputs: NDArray[Any]
    position: int
    replay: int = 0
    uncertain: int = 0
    scanned: bool = False


class Kernels:
    """States and rings of a net, and its kernels.

    Attributes:
        norm: each weight of the norm of `once`.
        launches: those of the last step, by the names of their kernels.

    Args:
        columns, warps: of a head's state, in one program. undone: tokens of a row that a step may compute again.
    """

    def __init__(
        self, net: Net, device: str, precision: str = "ieee", splits: int = 1, slots: int = 5, columns: int = 32,
        warps: int = 4, undone: int = 4,
    ) -> None:  # fmt: skip
        self.net, self.device, self.splits = net, device, splits
        self.ring = net.length + undone
        self.columns, self.warps = min(columns, padded(net.value)), warps
        self.norm = 1.0
        self.options = {"PRECISION": precision, "num_stages": 1}
        self.states = torch.full((slots, net.value_heads, net.key, net.value), float("nan"), device=device)
        self.ring_width = net.channels + 2 * net.value_heads
        self.rings = torch.full((slots, self.ring, self.ring_width), float("nan"), device=device)
        self.vectors = [torch.from_numpy(each).to(device) for each in net.vectors()]
        self.launches: dict[str, Callable[[], object]] = {}
        self.scan: HopperScan | None = None
        self.rows: HopperRows | None = None
        self.kept: ScannedChunks | None = None
        self.decoded: DecodedRows | None = None
        if precision == HOPPER:  # after torch has made the device's context
            shape = ScanKernels(net.key_heads, net.value_heads, net.length, self.ring, net.tiled)
            loaded = LoadedKernels("sm_90a")
            loaded.prepare([*shape.sources().values(), shape.rows()])
            self.scan = HopperScan(shape, loaded)
            self.rows = HopperRows(shape, loaded, _BLOCKS)

    def step(self, rows: list[Row]) -> list[NDArray[np.float32]]:
        """Outputs of each row."""
        counts = [len(row.inputs) for row in rows]
        starts = np.cumsum([0, *counts])
        partials = self._split(np.concatenate([row.inputs for row in rows]).astype(np.float32))
        output = self._empty(partials.shape[1], self.net.value_heads * self.net.value)
        sums = (partials, partials.stride(0), partials.stride(1), partials)
        table = self._table(rows, starts)
        self.launches = {"recur": lambda: self._recur(sums, table, output)}
        if any(row.scanned for row in rows):
            self.launches |= self._scans(rows, sums, table, output)
        slots = self._ring_slots(rows, starts)
        self.launches["keep_inputs"] = lambda: self._keep(sums, slots)
        for run in self.launches.values():
            run()
        found = output.cpu().numpy()
        return [found[start : start + count] for start, count in zip(starts, counts, strict=False)]

    def once(self, rows: list[Row], kind: Literal["f32", "f16"] = "f32") -> NDArray[np.float32]:
        """What a step of one token a row hands to the next matmul, [rows, value heads * value], of a norm of ones."""
        partials, net = self._split(np.concatenate([row.inputs for row in rows]).astype(np.float32)), self.net
        tokens, width, gated = len(rows), net.value_heads * net.value, self.columns == net.value
        sums, table = (partials, partials.stride(0), partials.stride(1), partials), self._table(rows, np.arange(tokens))
        output, state = self._empty(tokens, width), torch.zeros((2, tokens), dtype=torch.int32, device=self.device)
        form = InputFormat(kind) if self.rows is None else InputFormat("half", 16)
        target = ActivationBuffers(tokens, torch.device(self.device)).get(form, width)
        sizes, norm = {**self._ring, **self._sizes}, torch.ones(net.value, device=self.device) * self.norm
        self.launches = {
            "recur_once": lambda: recur_once[(len(table), net.value_heads, -(-net.value // self.columns))](
                *sums, self.rings, *self.vectors, self.states, table, output, width, float(net.key**-0.5), norm,
                NORM_EPS, *target.pointers(), *state, GATED=gated, TILED=net.tiled, BLOCK=self.columns,
                num_warps=self.warps, **sizes, **target.constants(),
            )
        }  # fmt: skip
        if self.rows is not None:
            return self._native_once(self.rows, partials, table, output, target if gated else None)
        self.launches["recur_once"]()
        assert not state.any()
        found = target.values.float() * (target.scales[:, None] if kind == "f16" else 1.0) if gated else output
        return found.cpu().numpy()

    def _native_once(
        self, rows: HopperRows, partials: torch.Tensor, table: torch.Tensor, output: torch.Tensor,
        gated: ActivationBuffer | None,
    ) -> NDArray[np.float32]:  # fmt: skip
        net, bias = self.net, torch.zeros(self.net.width, device=self.device) if self.splits > 1 else None
        norm = torch.ones(net.value, device=self.device) * self.norm
        self.decoded = DecodedRows(  # kept: a launch knows addresses alone
            partials, bias, self.rings, *self.vectors, self.states, table, norm, NORM_EPS, _FACTOR, output, gated,
            len(table),
        )  # fmt: skip
        stream = int(torch.cuda.current_stream().cuda_stream)
        self.launches = {
            "recur_once": partial(rows.start, self.decoded, net.key**-0.5, stream, dependent=False),
        }
        self.launches["recur_once"]()
        if gated is None:
            return output.cpu().numpy()
        blocks, chunks, *_ = gated.values.shape
        # Axes: block, chunk, a column's 4s, its 1s, eight rows, row, a column's 16s, its 2s.
        split = gated.values.float().reshape(blocks, chunks, 4, 2, -1, 8, 4, 2).permute(0, 4, 5, 1, 6, 2, 7, 3)
        found = split.reshape(-1, chunks * 64) * gated.scales[:, None]
        return found[: len(output)].cpu().numpy()

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, float("nan"), device=self.device)

    def _integers(self, values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=self.device)

    @property
    def _sizes(self) -> dict[str, Any]:
        net = self.net
        return {
            "SPLITS": self.splits, "BIAS": False, "KEY_HEADS": net.key_heads, "VALUE_HEADS": net.value_heads,
            "KEY": net.key, "VALUE": net.value, "DEPENDENT": False,
        }  # fmt: skip

    @property
    def _ring(self) -> dict[str, Any]:
        return {"LENGTH": self.net.length, "RING": self.ring, "WIDTH": self.ring_width}

    def _table(self, rows: list[Row], starts: NDArray[np.int64]) -> torch.Tensor:
        table = np.full((len(rows) + 1, 8), -1, np.int32)  # the last is padding
        for index, row in enumerate(rows):
            count = len(row.inputs)
            fields = row.slot, starts[index], count, row.replay, count - row.uncertain, row.position, row.scanned
            before = sum(-(-len(each.inputs) // TILE.value) for each in rows[:index] if each.scanned)
            table[index] = *fields, before
        return self._integers(table)

    def _ring_slots(self, rows: list[Row], starts: NDArray[np.int64]) -> torch.Tensor:
        slots = np.full(starts[-1], -1, np.int32)
        for index, row in enumerate(rows):
            for offset in range(max(len(row.inputs) - self.ring, 0), len(row.inputs)):
                slots[starts[index] + offset] = row.slot * self.ring + (row.position + offset) % self.ring
        return self._integers(slots)

    def _recur(self, sums: tuple[Any, ...], table: torch.Tensor, output: torch.Tensor) -> None:
        net = self.net
        recur[(net.value_heads, -(-net.value // self.columns), len(table))](
            *sums, self.rings, *self.vectors, self.states, table, output, output.stride(0), float(net.key**-0.5),
            BLOCK=self.columns, TILED=net.tiled, num_warps=self.warps, **self._ring, **self._sizes,
        )  # fmt: skip

    def _scans(
        self, rows: list[Row], sums: tuple[Any, ...], table: torch.Tensor, output: torch.Tensor
    ) -> dict[str, Callable[[], object]]:
        net, tokens, sizes = self.net, len(output), self._sizes
        found = [
            (i, first) for i, row in enumerate(rows) if row.scanned for first in range(0, len(row.inputs), TILE.value)
        ]
        tiles = [self._integers(each) for each in zip(*found, (-1, 0), strict=True)]
        scanned = self._integers([*(index for index, row in enumerate(rows) if row.scanned), -1])
        if self.scan is not None:
            return self._native_scans(self.scan, sums[0], table, tiles, scanned, output)
        kernel, decay_bias, rate = self.vectors
        mixed, key, heads = self._empty(tokens, net.channels), net.value_heads * net.key, net.value_heads
        new, ends = self._empty(tokens, heads * net.value), self._empty(tokens, heads)
        widths, is_short = (key, key, key, heads * TILE.value), self.options["PRECISION"] == "tf32"
        between = [self._empty(tokens, width).to(torch.float16 if is_short else torch.float32) for width in widths]
        made = [new, *between, ends]
        inputs, block = 2 * net.key_heads + heads, min(32, padded(net.value))
        of_states = {name: sizes[name] for name in ("VALUE_HEADS", "KEY", "VALUE", "DEPENDENT")}
        count = len(tiles[0])
        return {
            "scan_inputs": lambda: scan_inputs[(count, inputs, TILE.value // 16)](
                *sums, self.rings, kernel, table, *tiles, mixed, float(net.key**-0.5), TOKENS=16, **self._ring, **sizes
            ),
            "scan_prepare": lambda: scan_prepare[(count, heads)](
                *sums, decay_bias, rate, table, *tiles, mixed, *made, TILED=net.tiled, **sizes, **self.options
            ),
            "scan_states": lambda: scan_states[(len(scanned), heads, -(-net.value // block))](
                table, scanned, *made, self.states, output, output.stride(0), BLOCK=block, **of_states, **self.options
            ),
        }  # fmt: skip

    def _native_scans(
        self, scan: HopperScan, partials: torch.Tensor, table: torch.Tensor, tiles: list[torch.Tensor],
        scanned: torch.Tensor, output: torch.Tensor,
    ) -> dict[str, Callable[[], object]]:  # fmt: skip
        net, count = self.net, len(tiles[0])
        sizes = net.channels * TILE.value * 2, net.value_heads * LINK_BYTES, net.value_heads * FACTOR_BYTES
        scratch = tuple(torch.full((count * size,), 255, dtype=torch.uint8, device=self.device) for size in sizes)
        bias = torch.zeros(net.width, device=self.device) if self.splits > 1 else None
        chunks = ScannedChunks(
            partials, bias, self.rings, *self.vectors, table, *tiles, scanned, scratch, self.states, output, count,
            len(scanned),
        )  # fmt: skip
        self.kept = chunks  # its kernels know addresses alone
        stream = int(torch.cuda.current_stream().cuda_stream)
        return {f"scan_{name}": start for name, start in scan.launches(chunks, net.key**-0.5, stream, dependent=False)}

    def _keep(self, sums: tuple[Any, ...], slots: torch.Tensor) -> None:
        gates = self.net.value_heads * self.net.value
        tokens = next(count for count in (16, 2, 1) if len(slots) % count == 0)
        keep_inputs[(len(slots) // tokens, -(-self.ring_width // 256))](
            *sums, slots, self.rings, self.net.channels, gates, SPLITS=self.splits, BIAS=False, WIDTH=self.ring_width,
            DEPENDENT=False, TOKENS=tokens, BLOCK=256,
        )  # fmt: skip

    def _split(self, inputs: NDArray[np.float32]) -> torch.Tensor:
        """float32 [splits, tokens, width] that add up to the inputs."""
        parts = [np.random.default_rng(i).standard_normal(inputs.shape) for i in range(self.splits - 1)]
        parts.append(inputs - sum(parts) if parts else inputs)
        return torch.from_numpy(np.stack(parts).astype(np.float32)).to(self.device)
