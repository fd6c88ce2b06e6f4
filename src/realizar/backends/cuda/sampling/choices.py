"""`ChoiceMaker`: the `StepSampler` in torch and float64, for devices without CUDA kernels; the kernels' reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.device_errors import row_error, translate
from realizar.backends.cuda.sampling.logprobs import LogprobsAsked, start_logprobs
from realizar.backends.cuda.sampling.positions import Positions
from realizar.backends.cuda.sampling.sampler import Chosen, DeviceSampler
from realizar.backends.cuda.sampling.step_sampler import CopyToHost, RowLogprobs
from realizar.backends.cuda.sampling.verify import StepDrafts
from realizar.backends.cuda.step import CUDAStep
from realizar.backends.cuda.workspace import Workspace
from realizar.batch import OpenedRow
from realizar.outputs import RowError

_FAILED = -1  # in place of the choice of a row that raised


class ChoiceMaker:
    """A `StepSampler` on any device."""

    def __init__(self, workspace: Workspace, sampler: DeviceSampler) -> None:
        self._space, self._sampler = workspace, sampler
        self.errors: dict[int, RowError] = {}

    def capture(self) -> None:
        """Torch's kernels are launched one by one."""

    def free_graphs(self) -> None:
        """There are none."""

    def open(self, opened: OpenedRow) -> None:
        self._sampler.open(opened)

    def close(self, row: int) -> None:
        self._sampler.close(row)

    def awaits_masks(self, numbers: NDArray[np.intp]) -> bool:
        return self._sampler.follows_grammar(numbers.tolist())

    def take_in(
        self, numbers: NDArray[np.intp], choices: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        return self._sampler.take_in(numbers, choices)

    def make(self, step: CUDAStep) -> torch.Tensor:
        self.errors = {}
        wanted, arrays = step.wanted, self._space.arrays
        choices = self._space.choices[: wanted.num_choices]
        sampled = self._sampled(step)
        if not wanted.num_drafts:
            for _, chosen in self._sample(step, sampled, choices, None):
                self._sampler.accept(chosen)
            return choices[:, None]
        rows = [step.forward_input.rows[index] for index in wanted.choosing]
        ends = [step.forward_input.query_starts[index + 1] for index in wanted.choosing]
        drafts = StepDrafts.of(rows, ends, arrays["ids"])
        made = self._sample(step, sampled, choices, drafts)
        table, stands = drafts.verify(choices)
        reached = stands[drafts.rows, drafts.places]
        for indices, chosen in made:
            self._sampler.accept(chosen, reached[torch.tensor(indices, device=reached.device)])
        last = table.gather(1, stands.sum(dim=1, keepdim=True) - 1)[:, 0]
        numbers = torch.tensor([row.row for row in rows], device=table.device)
        self._space.last[numbers] = last.clamp(min=0)
        return table

    def start_logprobs(self, step: CUDAStep, part: range, copy: CopyToHost) -> list[RowLogprobs]:
        """In groups, as memory is reserved for a group's intermediate values."""
        asked: list[LogprobsAsked] = []
        places: list[int] = []
        wanted, rows = step.wanted, step.forward_input.rows
        start = part.start if self._sampler.wants_logprobs else max(part.start, wanted.num_choices)
        for index in range(start, part.stop):
            row = rows[wanted.rows[index]]
            if index >= wanted.num_choices:
                query = row.logprob_queries[wanted.places[index]]
                asked.append(LogprobsAsked(query.target, query.top_n))
                places.append(index)
            elif (top_n := self._sampler.sampling_of(row.row).logprobs) is not None:
                asked.append(LogprobsAsked(None, top_n))
                places.append(index)
        found: list[RowLogprobs] = []
        at_once = self._sampler.rows_at_once
        for first in range(0, len(places), at_once):
            group = places[first : first + at_once]
            these = torch.tensor(group, device=self._space.logits.device) - part.start
            logits, choices = self._space.logits[these], self._space.choices[these].long()
            found.append((group, start_logprobs(logits, asked[first : first + at_once], choices, copy)))
        return found

    def _sampled(self, step: CUDAStep) -> list[int]:
        """Choices that are not the largest logit, by their index; the others are counted."""
        rows, wanted = step.forward_input.rows, step.wanted
        sampled = []
        for index in range(wanted.num_choices):
            row = rows[wanted.rows[index]]
            if row.row in step.held:
                continue
            if row.row in step.masks or not self._sampler.takes_largest(row.row, wanted.places[index]):
                sampled.append(index)
            elif not row.num_drafts:
                self._sampler.note_largest(row.row)
        return sampled

    def _sample(
        self, step: CUDAStep, sampled: Sequence[int], choices: torch.Tensor, drafts: StepDrafts | None
    ) -> list[tuple[Sequence[int], Chosen]]:
        """Write choices, and return them with their indices: all at once, or row by row where one row's raise."""
        if not sampled:
            return []
        space = self._space
        try:
            made = [(sampled, self._chosen(step, sampled, drafts))]
        except Exception as error:
            if translate(error) is not None:
                raise
            choices[torch.tensor(sampled, device=choices.device)] = _FAILED
            made = self._sample_by_rows(step, sampled, drafts)
        for indices, chosen in made:
            choices[torch.tensor(indices, device=choices.device)] = chosen.ids.int()
        if drafts is None:
            these = torch.tensor(sampled, device=choices.device)
            numbers = [step.forward_input.rows[step.wanted.rows[index]].row for index in sampled]
            space.last[torch.tensor(numbers, device=choices.device)] = choices[these].clamp(min=0)
        return made

    def _sample_by_rows(
        self, step: CUDAStep, sampled: Sequence[int], drafts: StepDrafts | None
    ) -> list[tuple[Sequence[int], Chosen]]:
        """Sample row by row after one row's parameters raised: that row fails, the others get their choices."""
        made: list[tuple[Sequence[int], Chosen]] = []
        for row_index, group in itertools.groupby(sampled, step.wanted.rows.__getitem__):
            indices = list(group)
            try:
                made.append((indices, self._chosen(step, indices, drafts)))
            except Exception as error:  # noqa: BLE001 - one row's parameters are not the others' trouble
                self.errors[row_index] = row_error(error, "sampling")
        return made

    def _chosen(self, step: CUDAStep, indices: Sequence[int], drafts: StepDrafts | None) -> Chosen:
        """Choose at some of the step's choices, without taking them into the rows' state."""
        logits = self._space.logits
        these = torch.tensor(indices, device=logits.device)
        return self._sampler.choose(logits, self._positions(step, indices, drafts), step.masks, these)

    def _positions(self, step: CUDAStep, indices: Sequence[int], drafts: StepDrafts | None) -> Positions:
        given, wanted = step.forward_input, step.wanted
        rows = [given.rows[wanted.rows[index]] for index in indices]
        positions = [
            row.num_computed_tokens + wanted.tokens[index] - given.query_starts[wanted.rows[index]] + 1
            for index, row in zip(indices, rows, strict=True)
        ]
        numbers = [row.row for row in rows]
        if drafts is None:
            return Positions(numbers, positions)
        return Positions(
            numbers,
            positions,
            [wanted.places[index] for index in indices],
            drafts.ids[drafts.rows[torch.tensor(indices, device=drafts.rows.device)]],
            frozenset(row.row for row in rows if row.num_drafts),
        )
