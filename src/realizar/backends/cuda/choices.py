"""`ChoiceMaker`: the choices of a step, all rows and drafts at once. torch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import torch

from realizar.backends.cuda.device_errors import translate
from realizar.backends.cuda.sampling.positions import Positions
from realizar.backends.cuda.sampling.sampler import Chosen, DeviceSampler
from realizar.backends.cuda.step import CUDAStep
from realizar.backends.cuda.verify import StepDrafts
from realizar.backends.cuda.workspace import Workspace
from realizar.outputs import RowError

_LOG = logging.getLogger(__name__)
_FAILED = -1  # in place of the choice of a row that raised


class ChoiceMaker:
    """Makes the choices of the step that ran last, and takes them into its rows' state.

    Attributes:
        errors: of rows that failed on the host, by their index in the step.
    """

    def __init__(self, workspace: Workspace, sampler: DeviceSampler) -> None:
        self._space, self._sampler = workspace, sampler
        self.errors: dict[int, RowError] = {}

    def make(self, step: CUDAStep) -> torch.Tensor:
        """int32 [rows that choose, 1 + drafts], NOT_REACHED after a draft that was not chosen; below 0 is an error.

        Largest logits are found already; whatever finds others overwrites the choices in `Workspace.choices`.
        """
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

    def note(self, error: Exception, index: int, where: str) -> None:
        """Take an error for that of one row, unless it is the device's."""
        if translate(error) is not None:
            raise error
        _LOG.error("%s of a row failed", where, exc_info=error)
        self.errors[index] = RowError.of(error, where)

    def _sampled(self, step: CUDAStep) -> list[int]:
        """Choices that are not the largest logit, by their index; the others are counted."""
        rows, wanted = step.forward_input.rows, step.wanted
        sampled = []
        for index in range(wanted.num_choices):
            row = rows[wanted.rows[index]]
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
                self.note(error, row_index, "sampling")
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
