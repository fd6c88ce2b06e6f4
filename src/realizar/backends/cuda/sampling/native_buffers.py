"""`NativeBuffers`: memory of the sampling kernels beside that of a step, and its addresses for them. torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device import stream_of
from realizar.backends.cuda.native.launcher import checked, driver_module
from realizar.backends.cuda.native.sampling.source import BINS, ROOM, SPAN, TILE
from realizar.backends.cuda.sampling.native_rows import NativeRows, table_places
from realizar.backends.cuda.workspace import LOGIT_BLOCK, Workspace

_SAMPLED, _DRAFTED, _QUERY, _NEAR = 8, 4, 4, 8  # integers of a record
NO_MASK, DEFERRED = -1, -2  # in place of a mask
SHARED = 1 << 24  # from this number of a mask on: a line of the table that `read_shared` was given
MOST_IN_GRAPH = 20  # most probable ids that a query of a graph can list, as many as OpenAI's API
_MOST_DRY = 192 << 20
_RING = 4  # host copies of indices of masks: more than there are steps whose results were not read
MOST_KEPT = 1024  # masks of known states that the device keeps
_BIN_BYTES = (8 + 4) * BINS  # of a place whose logits are kept
_TILE_BYTES = 8 + 3 * 8 + 8 + 12  # sums and moments of a tile, its top, its share of a span
_LINE = 3 + 2 * MOST_IN_GRAPH
_PLACE_BYTES = 44 + 8 + 4 * (_SAMPLED + _DRAFTED + _QUERY + _NEAR) + 8 * (ROOM + _LINE) + 4


class NativeBuffers:
    """Buffers for as many sampled tokens as a step has logits.

    Adjusted logits and masks are made when they are first needed; the KV cache leaves them room.

    Attributes:
        lines: float64 [selected, 3 + 2 * MOST_IN_GRAPH], the log-probabilities that graphs find.
        tokens, queries: int32 [selected, fields], records of a step (`Sampled`, `Query` of sampling/rows.cu).
        drafted: the same of rows, in a step with drafts.
        mask_indices: int32 [selected], of each token's mask in a step that graphs sample, NO_MASK or DEFERRED.
        draft_table: int32 [rows, 1 + drafts], room for the sampled tokens that stand.
        tables: uint8, `Tables` of sampling/rows.cu.
    """

    def __init__(self, space: Workspace, rows: NativeRows) -> None:
        device, sizes = space.logits.device, space.arrays.sizes
        if LOGIT_BLOCK != TILE:
            raise ValueError(f"tiles of {TILE} logits in the sampler, and of {LOGIT_BLOCK} in the head")
        self._space, self._rows, self._device = space, rows, device
        count, self.vocab = space.logits.shape
        self.tiles, self.spans, self.words = (-(-self.vocab // size) for size in (TILE, SPAN, 32))

        def zeros(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.tokens = zeros((count, _SAMPLED), torch.int32)
        self.queries = zeros((count, _QUERY), torch.int32)
        self.drafted = zeros((sizes.rows, _DRAFTED), torch.int32)
        self.draft_table = zeros((count,), torch.int32)
        self.queries.fill_(-1)
        self.mask_indices = zeros((count,), torch.int32).fill_(NO_MASK)
        self._host_indices = [
            torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(_RING)
        ]
        self._next_indices = 0
        self._shared_masks = 0
        self.lines = zeros((count, _LINE), torch.float64)
        self._next_mu = zeros((count,), torch.float64)
        self._sums = zeros((count, self.tiles), torch.int64)
        self._weights = zeros((count, BINS), torch.int64)
        self._counts = zeros((count, BINS), torch.int32)
        self._moments = zeros((count, self.tiles, 3), torch.float64)
        self._cuts = zeros((count, 4), torch.int64)
        self._listed = zeros((count, ROOM), torch.int64)
        self._near = zeros((count, _NEAR), torch.int32)
        self._query_sums = zeros((count, self.spans), torch.int64)
        self._query_ranks = zeros((count, self.spans), torch.int32)
        self._query_counts = zeros((count,), torch.int32)
        self._adjusted = self._adjusted_tops = self._adjusted_ids = self._masks = zeros((0,), torch.int32)
        self.tables = zeros((27 * 8 + 16,), torch.uint8)
        self._write_tables()

    def need_adjusted(self) -> None:
        """Make room for all adjusted logits of a step, or none; torch.OutOfMemoryError where there is too little."""
        if not self._adjusted.numel():
            shape = self._space.logits.shape[0], self.tiles
            adjusted = torch.empty_like(self._space.logits)
            tops = torch.zeros(shape, device=self._device)
            ids = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._adjusted, self._adjusted_tops, self._adjusted_ids = adjusted, tops, ids
            self._write_tables()

    def masks(self, count: int) -> torch.Tensor:
        """Room for `count` masks of a step, int32 [count, words]."""
        return self._all_masks()[:count]

    def kept_masks(self) -> tuple[int, torch.Tensor]:
        """Masks that stay, int32 [MOST_KEPT, words], and the number of the first as a mask."""
        first = self._space.logits.shape[0]
        return first, self._all_masks()[first:]

    def _all_masks(self) -> torch.Tensor:
        if not self._masks.numel():
            shape = self._space.logits.shape[0] + MOST_KEPT, self.words
            self._masks = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._write_tables()
        return self._masks

    def read_shared(self, address: int) -> None:
        """Let the device read masks from SHARED on in memory of the host, at this address of the device's."""
        if address != self._shared_masks:
            self._shared_masks = address
            self._write_tables()

    def send_mask_indices(self, indices: NDArray[np.integer[Any]]) -> None:
        """Send the index of the mask of each of a step's sampled tokens: [tokens]. The host need not wait."""
        host = self._host_indices[self._next_indices]
        self._next_indices = (self._next_indices + 1) % _RING
        values = host.numpy()
        values[: len(indices)], values[len(indices) :] = indices, NO_MASK
        copy_pinned(self.mask_indices, host, self._device)

    def _write_tables(self) -> None:
        space = self._space
        tensors = (
            space.logits, space.block_tops, space.block_ids, self._adjusted, self._adjusted_tops, self._adjusted_ids,
            self._masks, space.arrays["ids"], space.sampled, space.last, self._rows.table, self._rows.mu, self._next_mu,
            self._sums, self._weights, self._counts, self._moments, self._cuts, self._query_sums, self._query_ranks,
            self._query_counts, space.arrays["selected_rows"], space.arrays["contexts"],
            self._listed, self._near, self.mask_indices,
        )  # fmt: skip
        addresses = np.array([*(tensor.data_ptr() for tensor in tensors), self._shared_masks], np.uint64)
        numbers = np.array([self.vocab, self.tiles, self.words, self.spans], np.int32)
        table = np.concatenate([addresses.view(np.uint8), numbers.view(np.uint8)])
        self.tables.copy_(torch.from_numpy(table), non_blocking=True)


def copy_pinned(to: torch.Tensor, of: torch.Tensor, device: torch.device) -> None:
    """Start a copy between a tensor of a device and one in pinned memory that nobody else uses until it is done.

    Both are contiguous and of one size. On a GPU torch makes an event for each such copy, which takes the host several
    times as long as the copy; elsewhere it is done at once. Raises KernelError.
    """
    if device.type == "cuda":
        copied = driver_module().cuMemcpyAsync(to.data_ptr(), of.data_ptr(), of.nbytes, stream_of(device))
        checked(copied, "a copy between the host and the device")
    else:
        to.copy_(of)


def fixed_bytes(selected: int, vocab_size: int) -> int:
    """Bytes that are made with a model for `selected` logits of a step."""
    return selected * (_BIN_BYTES + _PLACE_BYTES + _TILE_BYTES * -(-vocab_size // TILE))


def reserved_bytes(selected: int, max_rows: int, vocab_size: int, context_length: int) -> int:
    """Bytes that the KV cache must leave: adjusted logits, masks, penalties' counts, and some of DRY's tables.

    DRY's tables of all rows would be a gigabyte where contexts are long, and few rows have one. A row whose table does
    not fit is refused.
    """
    adjusted = selected * (4 * vocab_size + 8 * -(-vocab_size // TILE) + 4)
    dry = min(12 * max_rows * (table_places(context_length) + 1), _MOST_DRY)
    masks = (selected + MOST_KEPT) * 4 * -(-vocab_size // 32)
    return adjusted + masks + 4 * max_rows * vocab_size + dry
