"""Changes of single logits before the temperature: bias, repetition, presence and frequency penalties. torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realizar.backends.cuda.sampling.positions import Positions
from realizar.batch import OpenedRow
from realizar.sampling_params import SamplingParams

LARGEST = float(np.finfo(np.float32).max)


def bounded(values: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """float64 values as finite float32; a logit that was not, such as a forbidden id's, stays as it was."""
    limited = values.clamp(-LARGEST, LARGEST).to(torch.float32)
    return torch.where(torch.isfinite(before), limited, before)


def add_bias(logits: torch.Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    """Add to single logits of [rows, ids], in place. Args: entries: row, id and number of each."""
    device = logits.device
    rows = torch.tensor([row for row, _, _ in entries], device=device)
    ids = torch.tensor([token_id for _, token_id, _ in entries], device=device)
    values = torch.tensor([value for _, _, value in entries], dtype=torch.float64, device=device)
    before = logits[rows, ids]
    logits[rows, ids] = bounded(before.double() + values, before)


class PenaltyTable:
    """Counts of ids in each row's output, and which its prompt had; made when a row first needs it."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape, self._device = (max_rows, vocab_size), device
        self._active: dict[int, SamplingParams] = {}
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def active(self, row: int) -> bool:
        return row in self._active

    def open(self, opened: OpenedRow) -> None:
        row, sampling = opened.row, opened.sampling
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        if sampling.repetition_penalty == 1.0 and penalties == (0.0, 0.0):
            return
        if self._counts is None or self._in_prompt is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self._active[row] = sampling
        ids = np.asarray(opened.history, np.int64)
        prompt, output = ids[: opened.num_prompt_tokens], ids[opened.num_prompt_tokens :]
        vocab = self._shape[1]
        prompt, output = (part[(part >= 0) & (part < vocab)] for part in (prompt, output))
        counts = np.bincount(output, minlength=vocab).astype(np.int32)
        self._counts[row] = torch.from_numpy(counts).to(self._device)
        self._in_prompt[row] = torch.from_numpy(np.bincount(prompt, minlength=vocab) > 0).to(self._device)

    def close(self, row: int) -> None:
        self._active.pop(row, None)

    def accept(self, rows: Sequence[int], choices: torch.Tensor, reached: torch.Tensor | None = None) -> None:
        """Count tokens of the output, int64 [rows]: all, or those where `reached`, bool [rows]."""
        places = [index for index, row in enumerate(rows) if row in self._active]
        if places and self._counts is not None:
            these = torch.tensor(places, device=self._device)
            table_rows = torch.tensor([rows[i] for i in places], device=self._device)
            counted = torch.ones_like(these) if reached is None else reached[these]
            self._counts.index_put_((table_rows, choices[these]), counted.int(), accumulate=True)

    def apply(self, logits: torch.Tensor, positions: Positions) -> None:
        """Penalise in place, [positions, vocab]: drafts before a position count as tokens of the output."""
        rows = positions.rows
        places = [index for index, row in enumerate(rows) if row in self._active]
        if not places or self._counts is None or self._in_prompt is None:
            return
        samplings = [self._active[rows[i]] for i in places]
        these = torch.tensor(places, device=self._device)
        table_rows = torch.tensor([rows[i] for i in places], device=self._device)
        repetition, presence, frequency = (
            torch.tensor(values, dtype=torch.float64, device=self._device)[:, None]
            for values in (
                [s.repetition_penalty for s in samplings],
                [s.presence_penalty for s in samplings],
                [s.frequency_penalty for s in samplings],
            )
        )
        counts = self._counts[table_rows].double()
        if (ahead := positions.drafts_before(places, self._shape[1])) is not None:
            ids, before = ahead
            counts.scatter_add_(1, ids, before.double())
        before = logits[these]
        values = before.double()
        repeated = torch.where(values > 0.0, values / repetition, values * repetition)
        values = torch.where(self._in_prompt[table_rows] | (counts > 0.0), repeated, values)
        values = values - (frequency * counts + presence * (counts > 0.0))
        logits[these] = bounded(values, before)
