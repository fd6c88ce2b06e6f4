"""`NativeChoiceMaker`: the choices of a step by CUDA kernels, a few launches for all its rows. torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.native.sampling_source import MOST_LISTED
from realizar.backends.cuda.sampling.logprobs import LogprobsAsked, PendingLogprobs, start_logprobs
from realizar.backends.cuda.sampling.native_buffers import NativeBuffers
from realizar.backends.cuda.sampling.native_kernels import SamplingKernels
from realizar.backends.cuda.sampling.native_rows import ADJUST, CUT, DRAW, DRY, MIROSTAT, NativeRows
from realizar.backends.cuda.step import CUDAStep
from realizar.backends.cuda.step_sampler import RowLogprobs
from realizar.backends.cuda.workspace import Workspace
from realizar.batch import OpenedRow
from realizar.outputs import RowError

_NO_MASK = -1


class NativeChoiceMaker:
    """A `StepSampler` on an NVIDIA card.

    A step of plain greedy rows launches nothing: the head's kernel has chosen. Any other launches what the kinds of its
    rows need, each kernel over all of them. No row can fail on the host.

    Args:
        context_length: of a row.
    """

    def __init__(self, space: Workspace, context_length: int, kernels: SamplingKernels) -> None:
        device = space.logits.device
        self._space, self._kernels = space, kernels
        self._rows = NativeRows(space.arrays.sizes.rows, space.logits.shape[1], context_length, device)
        self._buffers = NativeBuffers(space, self._rows)
        self.errors: dict[int, RowError] = {}

    def open(self, opened: OpenedRow) -> None:
        self._rows.open(opened, self._kernels.count_history)

    def close(self, row: int) -> None:
        self._rows.close(row)

    def take_in(self, row: int, token_ids: Sequence[int]) -> tuple[list[int], bool]:
        return self._rows.take_in(row, token_ids)

    def make(self, step: CUDAStep) -> torch.Tensor:
        wanted, columns = step.wanted, step.forward_input.columns
        made = self._space.choices[: wanted.num_choices]
        if not wanted.num_choices:
            return made[:, None]
        of_rows = columns.numbers[wanted.choosing]
        if wanted.num_drafts:
            drafts = columns.num_drafts[wanted.choosing].astype(np.int64)
            table = self._make_with_drafts(step, of_rows, drafts)
            self._rows.outputs[of_rows[drafts == 0]] += 1
            return table
        count, flags = self._send_choices(step, of_rows, np.zeros_like(of_rows))
        if count:
            self._prepare(count, flags)
            self._pick(count, flags, None, drafted=False)
            self._finish(count, flags)
        self._rows.outputs[of_rows] += 1
        return made[:, None]

    def start_logprobs(self, step: CUDAStep, part: range) -> list[RowLogprobs]:
        wanted, columns = step.wanted, step.forward_input.columns
        asked: list[tuple[int, int, int]] = []  # index, target, top_n
        chosen = range(part.start, min(part.stop, wanted.num_choices))
        if chosen:
            top_n = self._rows.logprobs[columns.numbers[wanted.rows[chosen.start : chosen.stop]]]
            asked += [(part.start + int(at), -1, int(top_n[at])) for at in np.flatnonzero(top_n >= 0)]
        for index in range(max(part.start, wanted.num_choices), part.stop):
            query = columns.logprob_queries[wanted.rows[index]][wanted.places[index]]
            asked.append((index, -1 if query.target is None else query.target, query.top_n))
        long = [each for each in asked if min(each[2], self._buffers.vocab) > MOST_LISTED]
        found = (
            [self._logprobs(part.start, [each for each in asked if each not in long])] if len(asked) > len(long) else []
        )
        return found + [self._long_logprobs(part.start, *each) for each in long]

    def _make_with_drafts(self, step: CUDAStep, of_rows: NDArray[np.int64], drafts: NDArray[np.int64]) -> torch.Tensor:
        """The table of choices that stand, int32 [rows, 1 + drafts]."""
        wanted, most = step.wanted, step.wanted.num_drafts
        per_choice = np.repeat(of_rows, drafts + 1)
        places = np.array(wanted.places[: wanted.num_choices], np.int64)
        count, flags = self._send_choices(step, per_choice, places)
        if count:
            self._prepare(count, flags)
            one_by_one = flags & MIROSTAT  # a choice needs the number that the one before left
            for place in range(most + 1) if one_by_one else (None,):
                self._pick(count, flags, place, drafted=True)
        firsts = np.cumsum(drafts + 1) - (drafts + 1)
        tokens = np.array(wanted.tokens[: wanted.num_choices], np.int64)[firsts] + 1
        records = np.stack([of_rows, firsts, drafts, tokens], axis=1)
        self._send(records, self._buffers.drafted)
        self._kernels.settle(self._buffers, len(of_rows), most)
        if count:
            self._finish(count, flags)
        return self._buffers.draft_table[: len(of_rows) * (most + 1)].view(-1, most + 1)

    def _send_choices(self, step: CUDAStep, of_rows: NDArray[np.int64], places: NDArray[np.int64]) -> tuple[int, int]:
        """Send the records of the choices that are not the model's largest logit.

        Args:
            of_rows, places: row and drafts before it, of every choice of the step.

        Returns:
            How many there are, and the flags of all together.
        """
        rows, wanted = self._rows, step.wanted
        flags = rows.kinds[of_rows].astype(np.int64)
        ends_early = rows.outputs[of_rows] + places < rows.min_tokens[of_rows]
        flags[ends_early] |= ADJUST
        masks = np.full(len(of_rows), _NO_MASK, np.int64)
        if step.masks:
            self._send_masks(step, of_rows, places, ends_early, masks)
            flags[masks >= 0] |= ADJUST
        special = np.flatnonzero(flags)
        if not special.size:
            return 0, 0
        tokens = np.array(wanted.tokens[: wanted.num_choices], np.int64)[special]
        positions = step.forward_input.positions[tokens].astype(np.int64) + 1
        numbers, before = of_rows[special], places[special]
        columns = (special, numbers, before, positions, rows.outputs[numbers], masks[special], tokens - before + 1)
        self._send(np.stack([*columns, flags[special]], axis=1), self._buffers.choices)
        return len(special), int(np.bitwise_or.reduce(flags[special]))

    def _send_masks(
        self, step: CUDAStep, of_rows: NDArray[np.int64], places: NDArray[np.int64], ends_early: NDArray[np.bool_],
        numbers: NDArray[np.int64],
    ) -> None:  # fmt: skip
        """Send the masks of choices under a grammar, and write their numbers."""
        masked = [index for index, row in enumerate(of_rows.tolist()) if row in step.masks]
        if not masked:
            return
        found = []
        for number, index in enumerate(masked):
            row = int(of_rows[index])
            mask = np.atleast_2d(step.masks[row])[places[index]]
            found.append(self._rows.without_ends(row, mask) if ends_early[index] else mask)
            numbers[index] = number
        self._send(np.stack(found).view(np.int32), self._buffers.masks(len(found)))

    def _prepare(self, count: int, flags: int) -> None:
        if flags & ADJUST:
            self._buffers.need_adjusted()
            self._kernels.adjust(self._buffers, count, repetitions=bool(flags & DRY))
        if flags & DRAW:
            self._kernels.weigh(self._buffers, count)

    def _pick(self, count: int, flags: int, place: int | None, *, drafted: bool) -> None:
        if flags & CUT:
            self._kernels.cut(self._buffers, count, place)
        self._kernels.pick(self._buffers, count, place, drafted=drafted)

    def _finish(self, count: int, flags: int) -> None:
        if flags & DRY:
            self._kernels.extend(self._buffers, count)

    def _logprobs(self, first: int, asked: Sequence[tuple[int, int, int]]) -> RowLogprobs:
        """Start log-probabilities of tokens whose logits lie from those of `first` on."""
        vocab = self._buffers.vocab
        top_n = [min(each[2], vocab) for each in asked]
        most = max(top_n)
        records = np.array([(index - first, target, n, 0) for (index, target, _), n in zip(asked, top_n, strict=True)])
        self._send(records, self._buffers.queries)
        lines = torch.empty((len(asked), 3 + 2 * most), dtype=torch.float64, device=self._space.logits.device)
        self._kernels.logprobs(self._buffers, lines, most)
        return [index for index, _, _ in asked], PendingLogprobs(top_n, lines.to("cpu", non_blocking=True))

    def _long_logprobs(self, first: int, index: int, target: int, top_n: int) -> RowLogprobs:
        """The same for a list longer than the kernel's."""
        at = slice(index - first, index - first + 1)
        asked = [LogprobsAsked(None if target < 0 else target, top_n)]
        return [index], start_logprobs(self._space.logits[at], asked, self._space.choices[at].long())

    def _send(self, values: NDArray[np.int64] | NDArray[np.int32], where: torch.Tensor) -> None:
        """Send numbers as int32 to the first lines of a buffer; the host need not wait."""
        pinned = torch.empty(values.shape, dtype=torch.int32, pin_memory=where.is_cuda)
        pinned.numpy()[...] = values
        where[: len(values)].copy_(pinned, non_blocking=True)
