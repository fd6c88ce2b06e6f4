"""A step's integers: laid out once, filled on the host, fetched by one kernel, read by others at fixed addresses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import BlocksAhead, ForwardInput, SampledAhead
from realizar.backends.cuda.capture import GraphRecorder
from realizar.backends.cuda.device import DeviceProfile
from realizar.backends.cuda.kernels.fetch import begin_blocks, fetch, find_ids, take_sampled
from realizar.backends.cuda.launch import StepKind
from realizar.backends.row_axes import RowAxes
from realizar.batch import PROPOSED, OpenedRow

Integers: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

_HEADER = 16  # place 0: blocks per row of the block tables; 1: tokens of the step, without padding; _COUNT, BRINGING
_COUNT = 2  # place of the number of integers that the step has
BRINGING = 3  # place of the number of tokens of which `StepArrays.brought` is read
_SAMPLED = 16  # tokens of a row that are looked at at once
_FETCHED, _MOST_FETCHING = 1024, 256  # numbers of a block; programs for those of block tables
SCAN_TILE = 64  # tokens of a tile of `kernels.recurrences.delta_scan`
ROW_FIELDS = 8  # numbers of a row; see `kernels.recurrences.delta_net`
_RING = 3  # host copies: two steps in flight, and the one being filled


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of the largest step.

    Attributes:
        selected: tokens whose logits are computed at once. tiles: of chunks, of `tile_tokens` each.
        groups: cache groups. blocks: of one row.
        recurrences: layers have states.
        kept: layers after which the stream is kept.
        drafts: that another model proposes for a row.
        length: of the context, where the rope has several axes; else 0.
        width: of the stream, where embeddings bring what is added to it after the first layers; else 0.
        whole: layers see images whole.
    """

    tokens: int
    rows: int
    selected: int
    tiles: int
    groups: int
    blocks: int
    tile_tokens: int
    recurrences: bool = False
    kept: int = 0
    drafts: int = 0
    length: int = 0
    width: int = 0
    whole: bool = False


FillRecurrences: TypeAlias = Callable[[dict[str, NDArray[np.int32]], ForwardInput, StepKind], None]
"""Fills the arrays that layers with states read."""


class StepArrays:
    """The arrays on the device, as views of one buffer of int32, and their host copies.

    Attributes:
        fill_recurrences: of a model whose layers have states.
        last: int32 [rows], the token that was sampled last, by the number of the row. drafts: int32 [drafts, rows],
            those that were proposed last.
        given: of the step, in pinned memory: the first token of each run of given embeddings, and the run, float32
            [tokens, (1 + layers) * hidden_size], with what is added after the first layers.
        brought: int64 [tokens], addresses of the rows of `given` that bring such; 0 for other tokens.
        spread: positions of the step's tokens for which they differ from axis to axis, int32 [axes, tokens].
    """

    def __init__(self, sizes: StepSizes, device: DeviceProfile) -> None:
        self.sizes, self._device = sizes, device
        counts = {
            "header": _HEADER, "ids": sizes.tokens, "token_rows": sizes.tokens, "positions": sizes.tokens,
            "slots": sizes.groups * sizes.tokens, "starts": sizes.rows, "counts": sizes.rows, "contexts": sizes.rows,
            "decodes": 4 * sizes.rows, "tile_rows": sizes.tiles, "tile_firsts": sizes.tiles, "selected": sizes.selected,
            "selected_rows": sizes.selected, "angles": sizes.tokens if sizes.length else 0,
            "seen": sizes.tokens if sizes.whole else 0, **recurrence_counts(sizes),
            "tables": sizes.groups * sizes.rows * sizes.blocks,
        }  # fmt: skip
        self._places: dict[str, slice] = {}
        at = 0
        for name, count in counts.items():
            self._places[name] = slice(at, at + count)
            at += -(-count // 4) * 4  # 16-byte aligned
        self._buffer = torch.zeros(at, dtype=torch.int32, device=device.torch_device)
        self.last = torch.zeros(sizes.rows, dtype=torch.int32, device=device.torch_device)
        self.drafts = torch.zeros((sizes.drafts, sizes.rows), dtype=torch.int32, device=device.torch_device)
        # As `take_sampled` and `begin_blocks` leave them.
        self.lags, self._begins = (
            torch.zeros(sizes.rows, dtype=torch.int32, device=device.torch_device) for _ in range(2)
        )
        self._host = [torch.zeros(at, dtype=torch.int32, pin_memory=device.is_gpu) for _ in range(_RING)]
        self._views = [{name: host.numpy()[place] for name, place in self._places.items()} for host in self._host]
        self._copied: list[torch.cuda.Event | None] = [None] * _RING
        # Of each host copy, what it was filled for last: the numbers of its rows, the kind, and how many were selected.
        self._filled: list[tuple[NDArray[np.intp], StepKind, int] | None] = [None] * _RING
        self._copies: list[torch.cuda.CUDAGraph] = []  # of each host copy; empty: they are launched
        self._next = 0
        self.fill_recurrences: FillRecurrences | None = None
        self.given: Sequence[tuple[int, torch.Tensor]] = ()
        self._given = deque[Sequence[tuple[int, torch.Tensor]]](maxlen=_RING + 1)  # of steps that may still read them
        counted = sizes.tokens if sizes.width else 0
        self.brought = torch.zeros(counted, dtype=torch.int64, device=device.torch_device)
        self._brought = [torch.zeros(counted, dtype=torch.int64, pin_memory=device.is_gpu) for _ in range(_RING)]
        self._axes = RowAxes()
        self.shifts = torch.zeros(sizes.rows, dtype=torch.int32, device=device.torch_device)  # of `RowAxes`
        self.spread = np.zeros((3, 0), np.int32)
        if device.torch_device.type != "meta":
            self._launch_copy(self._host[0])  # compiles it

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._buffer[self._places[name]]

    @property
    def angles(self) -> torch.Tensor:
        """int32 [tokens], the row of each token in the tables of the rope, which without axes is its position."""
        return self["angles" if self.sizes.length else "positions"]

    def open(self, opened: OpenedRow) -> None:
        if self.sizes.length:
            self._axes.open(opened)
            self.shifts[opened.row] = self._axes.shift(opened.row)

    def close(self, row: int) -> None:
        self._axes.close(row)

    def slots(self, group: int) -> torch.Tensor:
        tokens = self.sizes.tokens
        return self["slots"][group * tokens : (group + 1) * tokens]

    def clear(self) -> None:
        """Write the arrays of an empty step on the device: no row, no slot."""
        self._buffer.zero_()
        for name in ("slots", "decodes", "tile_rows", "selected_rows", *recurrence_counts(self.sizes)):
            self[name].fill_(-1)

    def send(
        self,
        step: ForwardInput,
        kind: StepKind,
        selected: Integers,
        selected_rows: Integers,
    ) -> None:
        """Fill a host copy and start sending it.

        Args:
            kind: of the padded step; its entries beyond the step's are filled with "none".
            selected: index of every selected token, at most `sizes.selected`.
            selected_rows: the row that each one's sampled token is for, -1 where it is for none.
        """
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        views = self._views[self._next]
        views["header"][_COUNT] = self._fill(views, step, kind, selected, selected_rows)
        self.given = [(first, self._pinned(values)) for first, values in step.columns.embeddings] if kind.embeds else ()
        self._given.append(self.given)
        views["header"][BRINGING] = self._send_brought() if self.sizes.width else 0
        if self._copies:
            self._copies[self._next].replay()
        else:
            self._launch_copy(self._host[self._next])
        if self._device.is_gpu:
            event = self._copied[self._next] = self._copied[self._next] or torch.cuda.Event()
            event.record()
        self._next = (self._next + 1) % _RING

    def take_sampled(self, ahead: SampledAhead, read_ids: torch.Tensor) -> None:
        """Write tokens of a step that was sent, and select others, as far as only the device knows them.

        `read_ids`, int32, are those of the step that sampled.
        """
        lines = self._sent(ahead.lines)
        take_sampled[(len(lines),)](
            self["ids"], self["selected"], self.lags, lines, read_ids, ahead.tokens, ahead.tokens.shape[1],
            ahead.largest, BLOCK=_SAMPLED,
        )  # fmt: skip

    def begin_blocks(self, ahead: BlocksAhead, block_size: int) -> torch.Tensor:
        """Move the blocks of a step that was sent to where only the device knows that they begin.

        Returns the places of the states that they begin with, int32 [tokens of the step], soon overwritten.
        """
        lines, sizes = self._sent(ahead.lines), self.sizes
        begin_blocks[(len(lines),)](
            self["header"], self["ids"], self["positions"], self["slots"], sizes.tokens, self["contexts"],
            self["decodes"], self["tables"], sizes.rows, self._begins, lines, ahead.tokens, ahead.tokens.shape[1],
            ahead.largest, GROUPS=sizes.groups, BLOCK_SIZE=block_size, BLOCK=_SAMPLED,
        )  # fmt: skip
        return self._begins[: len(lines)]

    def _sent(self, lines: NDArray[np.int32]) -> torch.Tensor:
        """On their way to the device."""
        pinned = torch.empty(lines.shape, dtype=torch.int32, pin_memory=self._device.is_gpu)
        pinned.numpy()[:] = lines
        return pinned.to(self._device.torch_device, non_blocking=True)

    def warm_drafts(self, block_size: int) -> None:
        """Compile what steps of drafts launch beside their graphs, of no row."""
        where = self._device.torch_device
        sampled = torch.zeros((1, 1), dtype=torch.int32, device=where)
        self.begin_blocks(BlocksAhead(sampled, np.array([[0, 1, 1, 0]], np.int32), 0), block_size)
        nobody = np.array([[-1, 1, 0, -1, -1]], np.int32)
        self.take_sampled(SampledAhead(torch.zeros((0, 1), dtype=torch.int32, device=where), nobody, 0), self["ids"])

    def _pinned(self, values: NDArray[np.float32]) -> torch.Tensor:
        """The values themselves where they are pinned, as an encoder on the device leaves them."""
        if values.flags.writeable:
            found = torch.from_numpy(values)
            if found.is_pinned() or not self._device.is_gpu:
                return found
        copied = torch.empty(values.shape, pin_memory=self._device.is_gpu)
        copied.numpy()[:] = values
        return copied

    @property
    def brings_features(self) -> bool:
        """True if something is to be added to the step's stream after the first layers."""
        return bool(self.sizes.width) and any(values.shape[1] > self.sizes.width for _, values in self.given)

    def _send_brought(self) -> int:
        """Start sending `brought`, if any token has some; the number of tokens up to the last."""
        if not self.brings_features:
            return 0
        host, end = self._brought[self._next], 0
        places = host.numpy()
        places[:] = 0
        for first, values in self.given:
            if values.shape[1] > self.sizes.width:
                row_bytes, last = values.stride(0) * values.element_size(), first + len(values)
                places[first:last] = values.data_ptr() + row_bytes * np.arange(len(values))
                end = max(end, last)
        self.brought[:end].copy_(host[:end], non_blocking=True)
        return end

    def capture(self, recorder: GraphRecorder) -> None:
        """Start copies as graphs from now on: a launch by Triton takes the host several times as long."""
        self._copies = [recorder.record(partial(self._launch_copy, host)) for host in self._host]

    def release(self) -> None:
        self._copies.clear()

    def _launch_copy(self, host: torch.Tensor) -> None:
        sizes = self.sizes
        whole = self._places["tables"].start // _FETCHED
        if self._device.is_gpu:
            others = min(-(-len(host) // _FETCHED) - whole, _MOST_FETCHING)
            fetch[(whole + others,)](host, self._buffer, COUNT=_COUNT, WHOLE=whole, BLOCK=_FETCHED)
        else:
            count = int(host[_COUNT])
            self._buffer[:count].copy_(host[:count])
        if sizes.drafts:
            tokens = min(sizes.selected, sizes.tokens)  # of rows that decode, which come first
            find_ids[(-(-tokens // _FETCHED),)](
                self["ids"], self["token_rows"], self.last, self.drafts, sizes.rows, tokens, FIRST=PROPOSED,
                BLOCK=_FETCHED,
            )  # fmt: skip

    def _fill(
        self, views: dict[str, NDArray[np.int32]], step: ForwardInput, kind: StepKind, selected: Integers,
        selected_rows: Integers,
    ) -> int:  # fmt: skip
        columns, angles, filled = step.columns, step.positions, self._filled[self._next]
        tokens, decodes = len(columns.token_ids), views["decodes"].reshape(-1, 4)
        if self.sizes.length:
            angles, self.spread = self._rope_rows(step)
        # Of rows that decode on, the numbers are the very array: all but what is written below is there.
        if not columns.only_decodes or filled is None or filled[0] is not columns.numbers or (
            filled[1:] != (kind, len(selected))
        ):  # fmt: skip
            self._fill_rows(views, step, kind, selected, selected_rows)
            self._filled[self._next] = columns.numbers, kind, len(selected)
        views["ids"][:tokens] = columns.token_ids
        if kind.embeds:  # as `kernels.embed` knows them
            for first, values in columns.embeddings:
                views["ids"][first : first + len(values)] = -2 - columns.token_ids[first : first + len(values)]
        views["positions"][:tokens] = step.positions
        if kind.whole:  # the last position that each token sees
            views["seen"][:tokens] = step.positions
            for first, count in columns.images:
                views["seen"][first : first + count] = step.positions[first + count - 1]
        if self.sizes.length:
            views["angles"][:tokens] = angles
        for group, slots in enumerate(step.slot_mapping):
            first = group * self.sizes.tokens
            views["slots"][first : first + tokens] = slots
        contexts = columns.num_context_tokens
        views["contexts"][: len(columns)] = contexts
        if columns.only_decodes:
            decodes[:tokens, 2], decodes[:tokens, 3] = contexts, angles
        else:
            rows = (columns.num_tokens == 1).nonzero()[0]
            decodes[: len(rows), 2], decodes[: len(rows), 3] = contexts[rows], angles[columns.starts[rows]]
        if self.fill_recurrences is not None:
            self.fill_recurrences(views, step, kind)
        return self._fill_tables(views, step)

    def _fill_rows(
        self, views: dict[str, NDArray[np.int32]], step: ForwardInput, kind: StepKind, selected: Integers,
        selected_rows: Integers,
    ) -> None:  # fmt: skip
        """Fill in what stays while the same rows decode, and "none" wherever the step has nothing.

        Row, token, context and angle of each decode lie side by side: attention waits for one load.
        """
        columns = step.columns
        tokens, rows = len(columns.token_ids), len(columns)

        def put(name: str, values: Integers, padded: int, nothing: int) -> None:
            size = len(values)
            views[name][:size] = values
            views[name][size:padded] = nothing

        for name in ("ids", "positions", "angles") if self.sizes.length else ("ids", "positions"):
            views[name][tokens : kind.tokens] = 0
        for group in range(len(step.slot_mapping)):
            first = group * self.sizes.tokens
            views["slots"][first + tokens : first + kind.tokens] = -1
        views["token_rows"][: kind.tokens] = 0
        if columns.only_decodes:
            views["token_rows"][:rows] = columns.numbers
        elif len(follows := (columns.token_ids < 0).nonzero()[0]):
            owners = np.searchsorted(columns.starts, follows, side="right") - 1
            views["token_rows"][follows] = columns.numbers[owners]
        views["starts"][:rows] = columns.starts[:-1]
        views["counts"][:rows] = columns.num_tokens
        views["header"][1] = tokens
        decodes, decoding = views["decodes"].reshape(-1, 4), (columns.num_tokens == 1).nonzero()[0]
        decodes[: len(decoding), 0], decodes[: len(decoding), 1] = decoding, columns.starts[decoding]
        decodes[len(decoding) : kind.decodes] = -1
        tiles = list(tiles_of(step, self.sizes.tile_tokens)) if kind.tiles else []
        put("tile_rows", [row for row, _ in tiles], kind.tiles, -1)
        put("tile_firsts", [first for _, first in tiles], kind.tiles, 0)
        put("selected", selected, self.sizes.selected, 0)
        put("selected_rows", selected_rows, self.sizes.selected, -1)

    def _rope_rows(self, step: ForwardInput) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """A step's `angles` and `spread`."""
        positions = self._axes.positions(step.columns, step.positions)
        if positions.ndim == 1:
            return positions, np.zeros((3, 0), np.int32)
        differ = (positions != positions[0]).any(axis=0)
        spread = positions[:, differ]
        angles = positions[0].copy()
        angles[differ] = self.sizes.length + np.arange(spread.shape[1])
        return angles, spread

    def _fill_tables(self, views: dict[str, NDArray[np.int32]], step: ForwardInput) -> int:
        blocks = max((table.shape[1] for table in step.block_tables), default=0)
        stride = max(1, min(-(-blocks // 16) * 16, self.sizes.blocks))
        views["header"][0] = stride
        each = self.sizes.rows * stride
        end = 0
        for group, table in enumerate(step.block_tables):
            first = group * each
            part = views["tables"][first : first + table.shape[0] * stride].reshape(-1, stride)
            part[:, : table.shape[1]] = table[:, :stride]
            end = first + table.shape[0] * stride
        return self._places["tables"].start + end


def recurrence_counts(sizes: StepSizes) -> dict[str, int]:
    """Lengths of the arrays that layers with states read; see `recurrences.rows`."""
    if not sizes.recurrences:
        return {}
    tiles = sizes.tokens // SCAN_TILE + sizes.rows
    return {
        "recurring": ROW_FIELDS * sizes.rows, "scanned": sizes.rows, "scan_rows": tiles, "scan_firsts": tiles,
        "token_slots": sizes.tokens, "token_offsets": sizes.tokens, "ring_slots": sizes.tokens,
    }  # fmt: skip


def count_decodes(step: ForwardInput) -> int:
    return len(step.columns) if step.columns.only_decodes else int(np.count_nonzero(step.columns.num_tokens == 1))


def count_tiles(step: ForwardInput, tile_tokens: int) -> int:
    """How many there are of `tiles_of`."""
    if step.columns.only_decodes:
        return 0
    counts = step.columns.num_tokens
    return int((-(-counts // tile_tokens) * (counts > 1)).sum())


def tiles_of(step: ForwardInput, tile_tokens: int) -> list[tuple[int, int]]:
    """Row and first token of every tile of the rows of several tokens, longest contexts first."""
    columns = step.columns
    if columns.only_decodes:
        return []
    tiles = [
        (int(columns.num_computed_tokens[index]) + first, index, first)
        for index in (columns.num_tokens > 1).nonzero()[0].tolist()
        for first in range(0, int(columns.num_tokens[index]), tile_tokens)
    ]
    return [(index, first) for _, index, first in sorted(tiles, reverse=True)]
