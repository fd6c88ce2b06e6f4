"""The end of a step: choices, drafts, log-probabilities and pooled vectors, made on the device, copied to the host."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device_errors import translate
from realizar.backends.cuda.graphs import GraphRunner
from realizar.backends.cuda.launch import Launch
from realizar.backends.cuda.sampling.logprobs import LogprobsAsked, PendingLogprobs, start_logprobs
from realizar.backends.cuda.sampling.sampler import DeviceSampler
from realizar.backends.cuda.shapes import padded_rows, row_counts
from realizar.backends.cuda.step import NOT_REACHED, CUDAStep, PendingResult
from realizar.backends.cuda.step_arrays import StepShape
from realizar.backends.cuda.workspace import Workspace
from realizar.batch import ScheduledRow
from realizar.outputs import RowError

_LOG = logging.getLogger(__name__)
_FAILED = -1  # in place of the choice of a row that raised


class StepFinisher:
    """Finishes the step that ran last.

    Args:
        pool: launches that write final hidden states of the selected rows to `Workspace.pooled`.
    """

    def __init__(
        self, workspace: Workspace, graphs: GraphRunner, pool: Sequence[Launch], sampler: DeviceSampler
    ) -> None:
        self._space, self._graphs, self._pool, self._sampler = workspace, graphs, pool, sampler
        self._means: dict[int, tuple[torch.Tensor, int]] = {}
        self._errors: dict[int, RowError] = {}  # of the step that is being finished, by index of the row

    def close(self, row: int) -> None:
        """Forget a row's mean."""
        self._means.pop(row, None)

    def finish(self, step: CUDAStep) -> PendingResult:
        """Everything that the step's rows want; copies are started and not waited for, but for drafts."""
        most = self._space.arrays.sizes.selected
        self._errors = {}
        count = sum(want.query < 0 for want in step.wanted)
        chosen = self._choose(step, count)
        result = chosen.to("cpu", non_blocking=True, copy=True)  # before anything else is chosen among
        logprobs: list[tuple[Sequence[int], PendingLogprobs]] = []
        for first in range(0, len(step.wanted), most):
            part = range(first, min(first + most, len(step.wanted)))
            if first:
                self.logits([step.wanted[i].token for i in part])
            asked = part.stop > count or self._sampler.wants_logprobs
            logprobs += self._start_logprobs(step, part) if asked else []
        pooled = {
            index: vector.to("cpu", non_blocking=True)
            for index, row in enumerate(step.forward_input.rows)
            if (vector := self._pooled_or_error(index, row, step.forward_input.query_starts[index])) is not None
        }
        done = None
        if chosen.is_cuda:
            done = torch.cuda.Event()
            done.record()
        return PendingResult(result, logprobs, pooled, self._errors, done)

    def warm(self) -> None:
        """Compile what pooled rows start, for every number of them."""
        for rows in row_counts(self._space.arrays.sizes.selected):
            for launch in self._pool:
                launch.run(StepShape(rows, 0, 0))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [tokens, vocab] of some of the last step's tokens, at most `sizes.selected`; its choices are lost."""
        self._select(tokens)
        self._graphs.run_eagerly(StepShape(0, 0, 0), padded_rows(len(tokens), self._space.arrays.sizes.selected))
        return self._space.logits[: len(tokens)]

    def _select(self, tokens: Sequence[int]) -> None:
        arrays = self._space.arrays
        arrays["selected"][: len(tokens)].copy_(torch.tensor(tokens, dtype=torch.int32))
        arrays["selected_rows"].fill_(-1)

    def _choose(self, step: CUDAStep, count: int) -> torch.Tensor:
        """int32 [count] of `Workspace.choices`: NOT_REACHED where a draft before was not chosen.

        Largest logits are found already; whatever finds others overwrites the choices.
        """
        choices = self._space.choices[:count]
        first, drafted = [], {}
        for place, want in enumerate(step.wanted[:count]):
            if want.place == 0:
                first.append(place)
            if want.place == 0 and step.forward_input.rows[want.row_index].num_drafts:
                drafted[want.row_index] = place
        self._sample(step, first, choices)
        self._verify(step, drafted, choices)
        return choices

    def _verify(self, step: CUDAStep, drafted: dict[int, int], choices: torch.Tensor) -> None:
        """Choose after drafts for as long as each is what was chosen before it."""
        rows, reached = step.forward_input.rows, dict.fromkeys(drafted, 0)
        going = dict(drafted)
        while going:
            found = dict(zip(going, choices[list(going.values())].tolist(), strict=True))
            for index, token_id in found.items():
                row, place = rows[index], reached[index]
                reached[index] += 1
                over = place == row.num_drafts or token_id != row.draft_ids[place]
                if over or self._sampler.ends(row.row, token_id):
                    del going[index]
                else:
                    going[index] += 1
            self._sample(step, list(going.values()), choices)
        for index, first in drafted.items():
            row, count = rows[index], reached[index]
            choices[first + count : first + row.num_drafts + 1] = NOT_REACHED
            self._space.last[row.row] = choices[first + count - 1].clamp(min=0)

    def _sample(self, step: CUDAStep, places: Sequence[int], choices: torch.Tensor) -> None:
        """Make the choices at some places, one a row, and take them into the rows' state."""
        space, rows = self._space, step.forward_input.rows
        sampled, masks = [], {}
        for place in places:
            want = step.wanted[place]
            row = rows[want.row_index].row
            if row in step.masks:
                masks[row] = np.atleast_2d(step.masks[row])[want.place]
            elif self._sampler.takes_largest(row):
                self._sampler.note_largest(row)
                continue
            sampled.append(place)
        if not sampled:
            return
        numbers = [rows[step.wanted[place].row_index].row for place in sampled]
        positions = [self._position(step, place) for place in sampled]
        these = torch.tensor(sampled, device=choices.device)
        try:
            found = self._sampler.sample(space.logits[these], numbers, positions, masks)
        except Exception as error:
            if translate(error) is not None:
                raise
            found = self._sample_one_by_one(step, sampled, numbers, positions, masks)
        choices[these] = found.int()
        space.last[torch.tensor(numbers, device=choices.device)] = found.clamp(min=0).int()

    def _sample_one_by_one(
        self, step: CUDAStep, places: Sequence[int], numbers: Sequence[int], positions: Sequence[int],
        masks: Mapping[int, NDArray[np.uint32]],
    ) -> torch.Tensor:  # fmt: skip
        """The same choices, where one row's parameters raised: that row fails, the others get theirs."""
        found = torch.full((len(places),), _FAILED, dtype=torch.int64, device=self._space.logits.device)
        for index, place in enumerate(places):
            try:
                logits = self._space.logits[place : place + 1]
                found[index] = self._sampler.sample(logits, numbers[index : index + 1], [positions[index]], masks)[0]
            except Exception as error:  # noqa: BLE001 - one row's parameters are not the others' trouble
                self._note(error, step.wanted[place].row_index, "sampling")
        return found

    def _pooled_or_error(self, index: int, row: ScheduledRow, start: int) -> torch.Tensor | None:
        try:
            return self._pooled(row, start)
        except Exception as error:  # noqa: BLE001 - nor are its numbers
            self._note(error, index, "pooling")
            return None

    def _note(self, error: Exception, index: int, where: str) -> None:
        """Take an error for that of one row, unless it is the device's."""
        if translate(error) is not None:
            raise error
        _LOG.error("%s of a row failed", where, exc_info=error)
        self._errors[index] = RowError.of(error, where)

    def _position(self, step: CUDAStep, place: int) -> int:
        """Index in its sequence of the token that a choice makes."""
        want = step.wanted[place]
        row = step.forward_input.rows[want.row_index]
        return row.num_computed_tokens + want.token - step.forward_input.query_starts[want.row_index] + 1

    def _start_logprobs(self, step: CUDAStep, part: range) -> list[tuple[Sequence[int], PendingLogprobs]]:
        """Of the wanted tokens in `part`, whose logits and choices are there now; in groups, as sampling has them."""
        asked: list[LogprobsAsked] = []
        places: list[int] = []
        for index in part:
            want = step.wanted[index]
            row = step.forward_input.rows[want.row_index]
            if want.query >= 0:
                query = row.logprob_queries[want.query]
                asked.append(LogprobsAsked(query.target, query.top_n))
                places.append(index)
            elif (top_n := self._sampler.sampling_of(row.row).logprobs) is not None:
                asked.append(LogprobsAsked(None, top_n))
                places.append(index)
        found: list[tuple[Sequence[int], PendingLogprobs]] = []
        at_once = self._sampler.rows_at_once
        for first in range(0, len(places), at_once):
            group = places[first : first + at_once]
            these = torch.tensor(group, device=self._space.logits.device) - part.start
            logits, choices = self._space.logits[these], self._space.choices[these].long()
            found.append((group, start_logprobs(logits, asked[first : first + at_once], choices)))
        return found

    def _pooled(self, row: ScheduledRow, start: int) -> torch.Tensor | None:
        """The pooled hidden state that a row wants, float32 [hidden_size]; its first token is at `start`."""
        if row.pooling is None or not row.num_tokens:
            return None
        end = start + row.num_tokens
        if row.pooling == "last":
            return self._hidden(range(end - 1, end))[0].clone()
        total, count = self._means.get(row.row, (None, 0)) if row.num_computed_tokens else (None, 0)
        if count != row.num_computed_tokens:
            raise RuntimeError(f"a mean over {row.num_computed_tokens} earlier tokens is wanted, and {count} were seen")
        most = self._space.arrays.sizes.selected
        for first in range(start, end, most):
            part = self._hidden(range(first, min(first + most, end))).sum(dim=0, dtype=torch.float64)
            total = part if total is None else total + part
        assert total is not None
        count += row.num_tokens
        self._means[row.row] = total, count
        return (total / count).float()

    def _hidden(self, tokens: range) -> torch.Tensor:
        """Final hidden states float32 [tokens, hidden_size], until the next use of `pooled`."""
        self._select(tokens)
        shape = StepShape(padded_rows(len(tokens), self._space.arrays.sizes.selected), 0, 0)
        for launch in self._pool:
            launch.run(shape)
        return self._space.pooled[: len(tokens)]
