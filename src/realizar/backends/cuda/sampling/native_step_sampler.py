"""`NativeStepSampler`: the sampled tokens of a step by CUDA kernels, a few launches for all its rows. torch."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.native.sampling.source import MOST_LISTED
from realizar.backends.cuda.sampling.logprobs import PendingLogprobs, start_logprobs
from realizar.backends.cuda.sampling.native_buffers import (
    DEFERRED,
    MOST_IN_GRAPH,
    MOST_KEPT,
    NO_MASK,
    SHARED,
    NativeBuffers,
    copy_pinned,
)
from realizar.backends.cuda.sampling.native_graphs import SamplerGraphs
from realizar.backends.cuda.sampling.native_kernels import ALL_PLACES, SamplingKernels
from realizar.backends.cuda.sampling.native_rows import ADJUST, MIROSTAT, NativeRows
from realizar.backends.cuda.sampling.results import PendingResult
from realizar.backends.cuda.sampling.step_sampler import CopyToHost, PoolRows, RowLogprobs
from realizar.backends.cuda.shapes import row_counts
from realizar.backends.cuda.step import CUDAStep
from realizar.backends.cuda.workspace import Workspace
from realizar.backends.row_masks import RowMasks
from realizar.batch import OpenedRow

RESULT_BYTES = 384  # of a token: its id, and its log-probability with a list of 20 ids
_NO_ROW = -1  # in place of a row's number: it sampled nothing, and keeps its state
_NO_SLOT = -1  # of a query: it wants nothing
_AS_SAMPLED = -1  # in place of a query's target

Integers: TypeAlias = NDArray[np.integer[Any]]
Asked: TypeAlias = tuple[Integers, Integers, Integers]
"""Log-probabilities wanted: index of each token in the step, target or -1 for what is sampled, length of the list."""
_NOTHING_ASKED: Asked = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class _Replayed:
    """The log-probabilities of the step before, if they came from a graph, whose records the device still has.

    Attributes:
        indices, top_n: of the wanted tokens that have any: their index in the step, and the length of their list.
        num_changes, numbers: of `NativeRows`, and the rows of that step; -1 and none if it did not only decode.
    """

    graph: torch.cuda.CUDAGraph
    indices: Integers
    top_n: Integers
    num_changes: int = -1
    numbers: Integers | None = None

    def suits(self, num_changes: int, numbers: Integers) -> bool:
        """True if a step of these rows, which all decode, wants the same."""
        return num_changes == self.num_changes and self.numbers is not None and np.array_equal(numbers, self.numbers)


class NativeStepSampler:
    """A `StepSampler` on an NVIDIA card.

    A step of plain greedy rows launches nothing: the head's kernel has sampled. Any other step without drafts, all of
    whose rows sample, replays a graph, for which everything is on the device but the indices of grammars' masks. Where
    there are drafts, or chunks of prompts that go on, it sends records of its tokens, and launches what their kinds
    need, each kernel over all of them. Log-probabilities are a graph too, in steps of any rows, whose records are sent
    where they are not those of the step before. No row can fail on the host.
    """

    def __init__(self, space: Workspace, context_length: int, kernels: SamplingKernels) -> None:
        device = space.logits.device
        self._space, self._kernels = space, kernels
        self._rows = NativeRows(space.arrays.sizes.rows, space.logits.shape[1], context_length, device)
        self._buffers = NativeBuffers(space, self._rows)
        counts = row_counts(space.arrays.sizes.rows)
        self._graphs, self._logprob_graphs = SamplerGraphs(counts), SamplerGraphs(counts, (0,))
        self._queries = np.zeros((0, 4), np.int32)  # the records that were sent last, if it was for a graph
        self._replayed: _Replayed | None = None
        self._shared = SharedMasks()
        self._kept = np.zeros(MOST_KEPT, np.int64)  # versions of the masks that the device keeps, of `_kept_of`
        self._kept_of: NDArray[np.uint32] | None = None
        self._has_mask_indices = False  # the device has indices of masks of an earlier step
        self._free: list[HostCopies] = []  # as many steps have one as are in flight

    def capture(self) -> None:
        self._graphs.capture(self._launch, self._space.logits.device)
        self._logprob_graphs.capture(self._launch_logprobs, self._space.logits.device)

    def release(self) -> None:
        self._graphs.free()
        self._shared.release()
        self._logprob_graphs.free()
        self._replayed = None

    def open(self, opened: OpenedRow) -> None:
        self._rows.open(opened, self._kernels.count_history)

    def close(self, row: int) -> None:
        self._rows.close(row)

    def awaits_masks(self, numbers: NDArray[np.intp]) -> bool:
        return self._rows.any_follows and bool(self._rows.follow_grammars[numbers].any())

    def finish(self, step: CUDAStep, parts: Iterable[range], pool: PoolRows) -> PendingResult:
        """Copies to the host are started and not awaited."""
        made, space = self.make(step), self._space
        if len(step.wanted.tokens) > space.arrays.sizes.selected:
            made = made.clone()  # before logits of other parts are
        copies = self._free.pop() if self._free else None
        if copies is None:
            copies = HostCopies(space.arrays.sizes.selected * RESULT_BYTES, space.logits.device)
        copies.begin()
        result = copies.copy(made)  # before anything else is sampled
        logprobs = [each for part in parts for each in self.start_logprobs(step, part, copies.copy)]
        pooled = pool(step)
        copies.done()
        free = partial(self._free.append, copies)
        return PendingResult(made, result, logprobs, pooled, self._rows.take_in, copies.wait, free)

    def make(self, step: CUDAStep) -> torch.Tensor:
        """Sample the step that ran last: int32 [rows that sample, 1 + drafts].

        NOT_REACHED comes after a draft that was not sampled; below 0 is an error.
        """
        wanted, columns = step.wanted, step.forward_input.columns
        made = self._space.sampled[: wanted.num_sampled]
        if not wanted.num_sampled:
            return made[:, None]
        if wanted.num_drafts:
            return self._make_with_drafts(step)
        if columns.only_decodes:
            numbers, positions = columns.numbers, columns.num_context_tokens
        else:
            numbers, positions = columns.numbers[wanted.sampled_rows], columns.num_context_tokens[wanted.sampled_rows]
        if len(numbers) < len(columns) or not self._replay(step, numbers, positions):
            none = np.zeros_like(numbers)
            count, flags = self._send_sampled(step, numbers, none, positions, none)
            if count:
                self._sample(count, flags)
        self._rows.outputs[numbers[~step.are_deferred(numbers)] if step.deferred else numbers] += 1
        return made[:, None]

    def _replay(self, step: CUDAStep, numbers: Integers, positions: Integers) -> bool:
        """Sample a step all of whose rows sample by a graph; False where there is none."""
        flags = self._rows.flags_of(numbers, positions)
        if step.masks:
            flags |= ADJUST
        if not flags:
            return True
        graph = self._graphs.find(len(numbers), flags)
        if graph is None or not self._send_mask_indices(step, numbers):
            return False
        if flags & ADJUST:
            self._buffers.need_adjusted()
        graph.replay()
        return True

    def _send_mask_indices(self, step: CUDAStep, numbers: Integers) -> bool:
        """Send the index of each token's mask for a graph; False where a mask must be changed."""
        rows, given = self._rows, step.masks
        if not given and not step.deferred:
            if self._has_mask_indices:
                self._buffers.mask_indices.fill_(NO_MASK)
                self._has_mask_indices = False
            return True
        indices = np.full(len(numbers), NO_MASK)
        if given:
            if not isinstance(given, RowMasks):
                return False
            if rows.forbids_ends and np.count_nonzero(rows.outputs[numbers] < rows.min_tokens[numbers]):
                return False
            self._index_masks(given, numbers, indices)
        if step.deferred:
            indices[step.are_deferred(numbers)] = DEFERRED
        self._buffers.send_mask_indices(indices)
        self._has_mask_indices = True
        return True

    def _launch(self, count: int, flags: int) -> None:
        """Start the kernels of a step all of whose rows sample; what is captured."""
        self._kernels.list_sampled(self._buffers, count)
        self._sample(count, flags)

    def _sample(self, count: int, flags: int) -> None:
        self._kernels.prepare(self._buffers, count, flags)
        self._kernels.pick(self._buffers, count, flags, drafted=False)
        self._kernels.extend(self._buffers, count, flags)

    def start_logprobs(self, step: CUDAStep, part: range, copy: CopyToHost) -> list[RowLogprobs]:
        """Start log-probabilities of the wanted tokens in `part`, whose logits and sampled ids are there now."""
        if not self._rows.wants_logprobs and part.stop <= step.wanted.num_sampled:
            self._replayed = None
            return []
        columns, replayed = step.forward_input.columns, self._replayed
        whole = columns.only_decodes and not part.start
        if whole and replayed is not None and replayed.suits(self._rows.num_changes, columns.numbers[: part.stop]):
            return [self._replay_logprobs(replayed, copy)]
        found = self._start_logprobs(step, part, copy)
        if whole and self._replayed is not None:
            self._replayed.num_changes = self._rows.num_changes
            self._replayed.numbers = columns.numbers[: part.stop].copy()
        return found

    def _start_logprobs(self, step: CUDAStep, part: range, copy: CopyToHost) -> list[RowLogprobs]:
        self._replayed = None
        indices, targets, top_n = self._asked_of_sampled(step, part)
        if part.stop > step.wanted.num_sampled:
            of_queries = self._asked_of_queries(step, part)
            indices, targets, top_n = (
                np.concatenate(both) for both in zip((indices, targets, top_n), of_queries, strict=True)
            )
        top_n = np.minimum(top_n, self._buffers.vocab)
        if top_n.max(initial=0) <= MOST_LISTED:
            return [self._logprobs(part.start, (indices, targets, top_n), copy)] if len(indices) else []
        listed = top_n <= MOST_LISTED
        short = indices[listed], targets[listed], top_n[listed]
        found = [self._logprobs(part.start, short, copy)] if listed.any() else []
        long = zip(indices[~listed].tolist(), targets[~listed].tolist(), top_n[~listed].tolist(), strict=True)
        return found + [self._long_logprobs(part.start, *each, copy) for each in long]

    def _asked_of_sampled(self, step: CUDAStep, part: range) -> Asked:
        wanted, numbers = step.wanted, step.forward_input.columns.numbers
        if not self._rows.wants_logprobs or part.start >= wanted.num_sampled:
            return _NOTHING_ASKED
        if not step.forward_input.columns.only_decodes:
            numbers = numbers[wanted.sampled[1]]
        top_n = self._rows.logprobs[numbers[part.start : part.stop]]
        places = (top_n >= 0).nonzero()[0]
        return part.start + places, np.full(len(places), _AS_SAMPLED), top_n[places]

    def _asked_of_queries(self, step: CUDAStep, part: range) -> Asked:
        wanted, asked = step.wanted, []
        for index in range(max(part.start, wanted.num_sampled), part.stop):
            query = step.forward_input.columns.logprob_queries[wanted.rows[index]][wanted.places[index]]
            asked.append((index, _AS_SAMPLED if query.target is None else query.target, query.top_n))
        indices, targets, top_n = np.array(asked, np.int64).T
        return indices, targets, top_n

    def _make_with_drafts(self, step: CUDAStep) -> torch.Tensor:
        wanted, columns, most = step.wanted, step.forward_input.columns, step.wanted.num_drafts
        rows, drafts = columns.numbers[wanted.sampled_rows], columns.num_drafts[wanted.sampled_rows].astype(np.int64)
        tokens, _, places = wanted.sampled
        positions = step.forward_input.positions[tokens] + 1
        count, flags = self._send_sampled(step, np.repeat(rows, drafts + 1), places, positions, tokens - places + 1)
        if count:
            self._kernels.prepare(self._buffers, count, flags)
            one_by_one = flags & MIROSTAT  # a sampled token needs the number that the one before left
            for place in range(most + 1) if one_by_one else (ALL_PLACES,):
                self._kernels.pick(self._buffers, count, flags, place, drafted=True)
        firsts = np.cumsum(drafts + 1) - (drafts + 1)
        settled = np.where(step.are_deferred(rows), _NO_ROW, rows)
        self._send((settled, firsts, drafts, tokens[firsts] + 1), self._buffers.drafted)
        self._kernels.settle(self._buffers, len(rows), most)
        if count:
            self._kernels.extend(self._buffers, count, flags)
        self._rows.outputs[rows[(drafts == 0) & ~step.are_deferred(rows)]] += 1
        return self._buffers.draft_table[: len(rows) * (most + 1)].view(-1, most + 1)

    def _send_sampled(
        self, step: CUDAStep, numbers: Integers, places: Integers, positions: Integers, drafts: Integers
    ) -> tuple[int, int]:
        """Send the records of sampled tokens that are not the largest logit: their number, and all flags together.

        Args:
            numbers, places: of every token that the step samples, its row and how many drafts stand before it.
            positions: in its sequence of the token being sampled. drafts: index in the step of its row's first draft.
        """
        rows = self._rows
        flags, outputs = rows.kinds[numbers], rows.outputs[numbers]
        masks = np.full(len(numbers), NO_MASK)
        if rows.forbids_ends or step.masks:
            ends_early = outputs + places < rows.min_tokens[numbers]
            if step.masks:
                self._send_masks(step, numbers, places, ends_early, masks)
            flags[ends_early | (masks >= 0)] |= ADJUST
        flags[step.are_deferred(numbers)] = 0
        special = flags.nonzero()[0]
        if not special.size:
            return 0, 0
        all_flags = int(np.bitwise_or.reduce(flags))
        if all_flags & ADJUST:
            self._buffers.need_adjusted()
        columns = (special, *(each[special] for each in (numbers, places, positions, outputs, masks, drafts, flags)))
        self._send(columns, self._buffers.tokens)
        return len(special), all_flags

    def _send_masks(
        self, step: CUDAStep, numbers: Integers, places: Integers, ends_early: NDArray[np.bool_], masks: Integers
    ) -> None:
        """Send the masks of tokens under a grammar, and write their numbers to `masks`."""
        if isinstance(step.masks, RowMasks) and not step.masks.drafted and not ends_early.any():
            self._index_masks(step.masks, numbers, masks)
            return
        masked = [index for index, row in enumerate(numbers.tolist()) if row in step.masks]
        if not masked:
            return
        pinned = self._pinned((len(masked), self._buffers.words))
        words = pinned.numpy().view(np.uint32)
        pairs = zip(numbers[masked].tolist(), places[masked].tolist(), strict=True)
        np.stack([np.atleast_2d(step.masks[row])[place] for row, place in pairs], out=words)
        for number in ends_early[masked].nonzero()[0].tolist():
            words[number] = self._rows.without_ends(int(numbers[masked[number]]), words[number])
        masks[masked] = range(len(masked))
        self._buffers.masks(len(masked)).copy_(pinned, non_blocking=True)

    def _index_masks(self, given: RowMasks, numbers: Integers, masks: Integers) -> None:
        """Write to `masks` where the masks of rows without drafts are: on the device, in their table, or in what is
        sent of it.
        """
        masked, indices = np.arange(len(numbers)), given.indices
        if not np.array_equal(given.numbers, numbers):  # else all have one, in the same order
            index_of = np.full(len(self._rows.kinds), NO_MASK)
            index_of[given.numbers] = given.indices
            masked = (index_of[numbers] >= 0).nonzero()[0]
            if not len(masked):
                return
            indices = index_of[numbers[masked]]
        first = len(given.table) - len(given.versions)  # of those that may be kept
        if int(indices.max()) >= first:
            lines = indices - first
            are_kept = (lines >= 0) & (lines < MOST_KEPT)
            masks[masked[are_kept]] = self._keep_masks(given, lines[are_kept])
            masked, indices = masked[~are_kept], indices[~are_kept]
            if not len(masked):
                return
        address = self._shared.address(given.table)
        if address is not None:
            self._buffers.read_shared(address)
            masks[masked] = SHARED + indices
            return
        each, found = np.unique(indices, return_inverse=True)
        pinned = self._pinned((len(each), self._buffers.words))
        np.take(given.table, each, axis=0, out=pinned.numpy().view(np.uint32), mode="clip")  # else it copies twice
        masks[masked] = found
        self._buffers.masks(len(pinned)).copy_(pinned, non_blocking=True)

    def _keep_masks(self, given: RowMasks, lines: Integers) -> Integers:
        """The numbers of masks that stay on the device; those that are not there yet, or are others now, are sent."""
        first, room = self._buffers.kept_masks()
        if given.table is not self._kept_of:
            self._kept_of, self._kept[:] = given.table, 0
        if np.count_nonzero(self._kept[lines] != given.versions[lines]):
            new = np.unique(lines[self._kept[lines] != given.versions[lines]])
            pinned = self._pinned((len(new), self._buffers.words))
            pinned.numpy().view(np.uint32)[:] = given.table[len(given.table) - len(given.versions) + new]
            for place, line in enumerate(new.tolist()):
                room[line].copy_(pinned[place], non_blocking=True)
            self._kept[new] = given.versions[new]
        return first + lines

    def _replay_logprobs(self, replayed: _Replayed, copy: CopyToHost) -> RowLogprobs:
        """Start those whose records the device has already."""
        replayed.graph.replay()
        indices = replayed.indices
        return indices, PendingLogprobs(replayed.top_n, copy(self._buffers.lines[: len(indices)]))

    def _logprobs(self, first: int, asked: Asked, copy: CopyToHost) -> RowLogprobs:
        indices, targets, top_n = asked
        most = int(top_n.max())
        padded = self._logprob_graphs.padded(len(indices)) if most <= MOST_IN_GRAPH else 0
        queries = np.full((padded or len(indices), 4), _NO_SLOT, np.int32)
        for field, column in enumerate((indices - first, targets, top_n)):
            queries[: len(indices), field] = column
        if not padded or not np.array_equal(queries, self._queries):
            self._send(queries.T, self._buffers.queries)
        self._queries = queries
        if graph := self._logprob_graphs.find(len(indices)) if padded else None:
            self._replayed = _Replayed(graph, indices, top_n)
            return self._replay_logprobs(self._replayed, copy)
        lines = torch.empty((len(indices), 3 + 2 * most), dtype=torch.float64, device=self._space.logits.device)
        self._kernels.logprobs(self._buffers, lines, most)
        return indices, PendingLogprobs(top_n, copy(lines))

    def _launch_logprobs(self, count: int, _flags: int) -> None:
        self._kernels.logprobs(self._buffers, self._buffers.lines[:count], MOST_IN_GRAPH)

    def _long_logprobs(self, first: int, index: int, target: int, top_n: int, copy: CopyToHost) -> RowLogprobs:
        at = slice(index - first, index - first + 1)
        token_id = self._space.sampled[at].long()
        if target != _AS_SAMPLED:
            token_id.fill_(target)
        return [index], start_logprobs(self._space.logits[at], token_id, top_n, copy)

    def _send(self, columns: Sequence[Integers] | Integers, where: torch.Tensor) -> None:
        """Send records, a column for each field, to the first lines of a buffer; the host need not wait."""
        pinned = self._pinned((len(columns[0]), len(columns)))
        lines = pinned.numpy()
        for field, column in enumerate(columns):
            lines[:, field] = column
        where[: len(lines)].copy_(pinned, non_blocking=True)

    def _pinned(self, shape: tuple[int, int]) -> torch.Tensor:
        """Memory of the host, int32, that torch uses again once a copy out of it is done."""
        return torch.empty(shape, dtype=torch.int32, pin_memory=self._space.logits.is_cuda)


_ALIGNMENT = 16
_MOST_VIEWS = 1024


class HostCopies:
    """Copies of a step's results on their way to the host.

    They lie in memory of fixed size, room for the results of most steps, which the driver can write while the host
    works; what does not fit gets memory of its own. Memory that is allocated for each copy costs more time than the
    copy.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._room = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._used = 0
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}  # of parts of the room, made before

    def begin(self) -> None:
        """Begin the copies of another step; those of the step before were read."""
        self._used = 0

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The host's copy of a tensor, which is there after `wait`; `done` must follow the last one."""
        start, size = self._used, tensor.nbytes
        if start + size > len(self._room):
            return tensor.to("cpu", non_blocking=True, copy=True)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        key = start, tensor.dtype, tensor.shape
        if (copied := self._views.get(key)) is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            copied = self._views[key] = self._room[start : start + size].view(tensor.dtype).view(tensor.shape)
        copy_pinned(copied, tensor.contiguous(), tensor.device)
        return copied

    def done(self) -> None:
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()


_LOG = logging.getLogger(__name__)


class SharedMasks:
    """Locks the pages of the table that it was asked for last, so that kernels read it with no work of the host."""

    def __init__(self) -> None:
        self._table: NDArray[np.uint32] | None = None  # also keeps its memory mapped while its pages are locked
        self._address: int | None = None

    def address(self, table: NDArray[np.uint32]) -> int | None:
        """Where the device reads the table, uint32 [lines, words]; None if its pages can't be locked.

        It begins at a page, and its last page is its own.
        """
        if table is not self._table:
            self.release()
            self._table, self._address = table, _lock(table)
        return self._address

    def release(self) -> None:
        """Unlock the pages, once no kernel reads them. Idempotent."""
        if self._address is not None and self._table is not None:
            torch.cuda.synchronize()
            _unlock(self._table)
        self._table = self._address = None


def _lock(table: NDArray[np.uint32]) -> int | None:
    """Lock the pages of a table; its address on the device, None where either is refused."""
    from cuda.bindings import driver  # with the kernels that read them

    # By the driver: a refusal of the runtime would be the next error that torch finds, and end the engine.
    size = -(-table.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    (status,) = driver.cuMemHostRegister(table.ctypes.data, size, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
    if int(status):
        _LOG.info("the pages of masks can't be locked: %s", status.name)
        return None
    status, address = driver.cuMemHostGetDevicePointer(table.ctypes.data, 0)
    if int(status):
        _LOG.info("the device can't read the pages of masks: %s", status.name)
        _unlock(table)
        return None
    return int(address)


def _unlock(table: NDArray[np.uint32]) -> None:
    from cuda.bindings import driver

    driver.cuMemHostUnregister(table.ctypes.data)
