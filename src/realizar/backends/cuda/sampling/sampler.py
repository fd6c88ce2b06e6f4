"""`DeviceSampler`: the choice of many rows' next tokens on the device. torch.

Order and meaning are those of the CPU's sampler, in float64, so that both make the same choice from the same logits.
Random numbers are computed on the host, from (seed, choice, position, draw): the host knows all four. What depends on
tokens that only the device knows (penalty counts, DRY matches, mirostat's state) lives in tables on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends import philox
from realizar.backends.cuda.sampling import truncation
from realizar.backends.cuda.sampling.dry import DryTable, table_places
from realizar.backends.cuda.sampling.ends import OutputEnds
from realizar.backends.cuda.sampling.penalties import PenaltyTable, add_bias
from realizar.backends.cuda.sampling.positions import Positions
from realizar.backends.row_faults import check_logit_bias
from realizar.batch import OpenedRow
from realizar.sampling_params import SamplingParams

NONE_ALLOWED = -3  # in place of the choice of a row all of whose ids are forbidden; any other below 0: unusable logits
SCRATCH_BYTES_PER_ID = 128  # float64 copies of a row's logits, the order of a sort and what sorting takes, at most
_LEAST_SCRATCH, _MOST_SCRATCH = 256 << 20, 2 << 30
_MOST_DRY = 128 << 20


@dataclass(slots=True)
class RowState:
    """The host's state of an open row.

    Attributes:
        seed, choice: of its random numbers.
        num_output_tokens: chosen so far, those not read back yet included, but for a row with drafts.
    """

    sampling: SamplingParams
    seed: int
    choice: int
    num_output_tokens: int
    end_ids: tuple[int, ...]

    def forbids_end(self, place: int) -> bool:
        """True if `min_tokens` forbids the output to end after its tokens and `place` drafts."""
        return bool(self.end_ids) and self.num_output_tokens + place < self.sampling.min_tokens


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choices that are not part of their rows yet.

    Attributes:
        ids: int64 [positions]; -1 where the logits can't be used, NONE_ALLOWED where every id is forbidden.
        taken: int64 [positions], the same as ids of the vocabulary, for the rows' state.
        mirostat_mu: float64 [positions], after each choice of a row with mirostat; None where no row has it.
    """

    positions: Positions
    ids: torch.Tensor
    taken: torch.Tensor
    mirostat_mu: torch.Tensor | None


class DeviceSampler:
    """State of all rows.

    Args:
        max_rows, context_length: sizes of the tables, which are made when a row first needs them.
        scratch_bytes: what may be taken beside them at once: rows are sampled in groups that keep to it.
    """

    def __init__(
        self, max_rows: int, vocab_size: int, context_length: int, device: torch.device, scratch_bytes: int = 1 << 30
    ) -> None:
        self.rows_at_once = max(1, scratch_bytes // (SCRATCH_BYTES_PER_ID * vocab_size))
        self._vocab_size, self._device = vocab_size, device
        self._rows: dict[int, RowState] = {}
        self._ends = OutputEnds(vocab_size)
        self._logprob_rows: set[int] = set()
        self._penalties = PenaltyTable(max_rows, vocab_size, device)
        self._dry = DryTable(vocab_size, context_length, device)
        self._mirostat_mu = torch.zeros(max_rows, dtype=torch.float64, device=device)

    def open(self, opened: OpenedRow) -> None:
        """Start a row.

        Raises:
            InvalidRequestError: `logit_bias` names an id beyond the vocabulary.
        """
        row, sampling = opened.row, opened.sampling
        check_logit_bias(sampling, self._vocab_size)
        seed = philox.fresh_seed() if sampling.seed is None else sampling.seed
        ends = tuple(i for i in sampling.stop_token_ids if 0 <= i < self._vocab_size)
        num_output_tokens = len(opened.history) - opened.num_prompt_tokens
        self._rows[row] = RowState(sampling, seed, opened.choice, num_output_tokens, ends)
        if sampling.logprobs is not None:
            self._logprob_rows.add(row)
        self._ends.open(row, sampling)
        self._penalties.open(opened)
        self._dry.open(opened)
        if sampling.mirostat:
            self._mirostat_mu[row] = 2.0 * sampling.mirostat_tau

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
        self._ends.close(row)
        self._logprob_rows.discard(row)
        self._penalties.close(row)
        self._dry.close(row)

    @property
    def wants_logprobs(self) -> bool:
        """True if any open row asks for log-probabilities of its choices."""
        return bool(self._logprob_rows)

    def follows_grammar(self, rows: Sequence[int]) -> bool:
        """True if any of these rows, of which some may not be open, follows a grammar."""
        states = (self._rows.get(row) for row in rows)
        return any(state is not None and state.sampling.structured is not None for state in states)

    def sampling_of(self, row: int) -> SamplingParams:
        return self._rows[row].sampling

    def takes_largest(self, row: int, place: int = 0) -> bool:
        """True if the row's choice after `place` drafts, without a mask, is the largest logit of the model's."""
        state = self._rows[row]
        changed = state.sampling.logit_bias or self._penalties.active(row) or self._dry.active(row)
        return state.sampling.greedy and not changed and not state.forbids_end(place)

    def note_largest(self, row: int) -> None:
        """Count a token that was chosen without `choose`."""
        self._rows[row].num_output_tokens += 1

    def choose(
        self, logits: torch.Tensor, positions: Positions, masks: Mapping[int, NDArray[np.uint32]],
        indices: torch.Tensor | None = None,
    ) -> Chosen:  # fmt: skip
        """Choose at every position; no row's state changes before `accept`.

        Logits are copied group by group, `rows_at_once` of them, since no memory is reserved for a copy of all.

        Args:
            logits: float32 [any, vocab], left as they are.
            masks: by row uint32 [ceil(vocab / 32)], or [drafts + 1, ceil(vocab / 32)].
            indices: int64 [positions], of each position's logits on the device; None where they follow one another.

        Raises:
            torch.OutOfMemoryError: there is not as much memory as was to be kept free.
        """
        count, at_once = len(positions), self.rows_at_once
        after = None
        if any(self._rows[row].sampling.mirostat for row in positions.rows):
            after = torch.zeros(count, dtype=torch.float64, device=self._device)
        current = None if after is None else self._mirostat_mu.clone()
        parts = []
        for first in range(0, count, at_once):
            part = slice(first, first + at_once)
            numbers = None if current is None or after is None else (current, after[part])
            copied = logits[part].clone() if indices is None else logits[indices[part]]
            parts.append(self._choose(copied, positions.part(first, first + at_once), masks, numbers))
        ids, taken = (torch.cat(each) if len(parts) > 1 else each[0] for each in zip(*parts, strict=True))
        return Chosen(positions, ids, taken, after)

    def accept(self, chosen: Chosen, reached: torch.Tensor | None = None) -> None:
        """Take choices into their rows' state.

        What the host must know of a row with drafts, how many of its choices stand, comes with `take_in`.

        Args:
            reached: bool [positions]: where all drafts before are right; None where no row has drafts.
        """
        rows, drafted = chosen.positions.rows, chosen.positions.drafted
        self._penalties.accept(rows, chosen.taken, reached)
        for index, row in enumerate(rows):
            if row not in drafted:
                self._rows[row].num_output_tokens += 1
                if self._dry.active(row):
                    self._dry.accept(row, chosen.taken[index])
        if chosen.mirostat_mu is not None:
            self._accept_mirostat(chosen.positions, chosen.mirostat_mu, reached)

    def _accept_mirostat(self, positions: Positions, mirostat_mu: torch.Tensor, reached: torch.Tensor | None) -> None:
        """Each row's `mirostat_mu` becomes that after its last choice that was reached."""
        places = [index for index, row in enumerate(positions.rows) if self._rows[row].sampling.mirostat]
        rows = [positions.rows[index] for index in places]
        these = torch.tensor(places, device=self._device)
        table_rows = torch.tensor(rows, device=self._device)
        after = mirostat_mu[these]
        if reached is not None:
            goes_on = [row == following for row, following in zip(rows, [*rows[1:], -1], strict=True)]
            stands = reached[these]
            later = torch.tensor(goes_on, device=self._device) & stands.roll(-1)
            after = torch.where(stands & ~later, after, 0.0)
        self._mirostat_mu[table_rows] = 0.0
        self._mirostat_mu.index_put_((table_rows,), after, accumulate=True)  # one number a row is not 0

    def take_in(
        self, numbers: NDArray[np.intp], choices: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Take in the choices of rows with drafts once the host has read them; see `StepSampler`."""
        rows = numbers.tolist()
        outputs = np.array([self._rows[row].num_output_tokens for row in rows], np.int64)
        counts, ended = self._ends.up_to_end(numbers, choices, outputs)
        for row, token_ids, count in zip(rows, choices.tolist(), counts.tolist(), strict=True):
            self._rows[row].num_output_tokens += count
            for token_id in token_ids[:count]:
                self._dry.accept(row, token_id)
        return counts, ended

    def _choose(
        self, logits: torch.Tensor, positions: Positions, masks: Mapping[int, NDArray[np.uint32]],
        mirostat: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """`ids` and `taken` of `Chosen`, from logits that are overwritten; `mirostat` is as in `_draw`."""
        rows = positions.rows
        forbidding = any(
            row in masks or self._rows[row].forbids_end(place) for row, place in positions.rows_and_places()
        )
        self._adjust(logits, positions, masks)
        top = logits.max(dim=1, keepdim=True).values
        usable = torch.isfinite(top[:, 0])
        choices = first_largest(logits, top)
        drawn = [index for index, row in enumerate(rows) if not self._rows[row].sampling.greedy]
        if drawn:
            these = torch.tensor(drawn, device=self._device)
            part = torch.where(usable[these, None], logits[these], 0.0)
            choices[these] = self._draw(part, positions, drawn, mirostat)
        found = torch.where(usable, choices, -1)
        ids = torch.where(torch.isneginf(top[:, 0]), NONE_ALLOWED, found) if forbidding else found
        return ids, choices

    def _adjust(self, adjusted: torch.Tensor, positions: Positions, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        """Apply all that acts on single ids to logits, float32 [positions, vocab], in place."""
        rows = positions.rows
        masked = [index for index, row in enumerate(rows) if row in masks]
        if masked:
            found = [np.atleast_2d(masks[rows[index]])[positions.place(index)] for index in masked]
            words = torch.from_numpy(np.stack(found).view(np.int32)).to(self._device)
            bits = (words[:, :, None] >> torch.arange(32, device=self._device)) & 1
            allowed = bits.reshape(len(masked), -1)[:, : self._vocab_size].bool()
            these = torch.tensor(masked, device=self._device)
            adjusted[these] = torch.where(allowed, adjusted[these], float("-inf"))
        self._forbid_ends(adjusted, positions, masks)
        entries = [
            (index, token_id, value)
            for index, row in enumerate(rows)
            for token_id, value in self._rows[row].sampling.logit_bias.items()
        ]
        if entries:
            add_bias(adjusted, entries)
        self._penalties.apply(adjusted, positions)
        self._dry.apply(adjusted, positions)

    def _forbid_ends(self, adjusted: torch.Tensor, positions: Positions, masks: Mapping[int, object]) -> None:
        """End ids before `min_tokens`, unless a grammar leaves nothing else."""
        for index, (row, place) in enumerate(positions.rows_and_places()):
            state = self._rows[row]
            if not state.forbids_end(place):
                continue
            ends = torch.tensor(state.end_ids, device=self._device)
            kept = adjusted[index, ends]
            adjusted[index, ends] = float("-inf")
            if row in masks:
                adjusted[index, ends] = torch.where(adjusted[index].max() == float("-inf"), kept, float("-inf"))

    def _draw(
        self, logits: torch.Tensor, positions: Positions, drawn: Sequence[int],
        mirostat: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:  # fmt: skip
        """int64 [drawn].

        Args:
            logits: of the positions `drawn`.
            mirostat: `mirostat_mu`, float64 [max_rows], which becomes that after each row's last position here; and
                float64 [positions], which gets that after each. None where no row has mirostat.
        """
        states = [self._rows[positions.rows[index]] for index in drawn]
        where = [positions.positions[index] for index in drawn]
        uniforms = self._uniforms(states, where, philox.DRAW_TOKEN)
        acts = [
            state.sampling.xtc_probability > 0.0
            and not state.sampling.mirostat
            and philox.uniform(state.seed, state.choice, position, philox.DRAW_XTC) < state.sampling.xtc_probability
            for state, position in zip(states, where, strict=True)
        ]
        samplings = [state.sampling for state in states]
        with_mirostat = [index for index, sampling in enumerate(samplings) if sampling.mirostat]
        if mirostat is None or not with_mirostat:
            return truncation.draw_truncated(logits, samplings, acts, uniforms)
        choices = torch.empty(len(drawn), dtype=torch.int64, device=self._device)
        others = [index for index, sampling in enumerate(samplings) if not sampling.mirostat]
        if others:
            these = torch.tensor(others, device=self._device)
            choices[these] = truncation.draw_truncated(
                logits[these], [samplings[i] for i in others], [acts[i] for i in others], uniforms[these]
            )
        current, after = mirostat
        places = [positions.place(index) for index in drawn]
        for place in sorted({places[i] for i in with_mirostat}):  # a choice needs the number that the one before left
            part = [i for i in with_mirostat if places[i] == place]
            these = torch.tensor(part, device=self._device)
            table_rows = torch.tensor([positions.rows[drawn[i]] for i in part], device=self._device)
            choices[these], left = truncation.draw_mirostat(
                logits[these], [samplings[i] for i in part], current[table_rows], uniforms[these]
            )
            current[table_rows] = left
            after[torch.tensor([drawn[i] for i in part], device=self._device)] = left
        return choices

    def _uniforms(self, states: Sequence[RowState], positions: Sequence[int], draw: int) -> torch.Tensor:
        values = [
            philox.uniform(state.seed, state.choice, position, draw)
            for state, position in zip(states, positions, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def scratch_bytes(max_rows: int, vocab_size: int, memory_bytes: int) -> int:
    """Scratch bytes of sampling, beside its tables, on a device with so much memory."""
    most = min(max(memory_bytes // 64, _LEAST_SCRATCH), _MOST_SCRATCH)
    return min(most, max_rows * vocab_size * SCRATCH_BYTES_PER_ID)


def reserved_bytes(max_rows: int, vocab_size: int, context_length: int, memory_bytes: int) -> int:
    """Bytes that the KV cache must leave to sampling: scratch, a group's logits, penalties' tables, and some of DRY's.

    DRY's tables of all rows would be a gigabyte where contexts are long, and few rows have one. A row whose table does
    not fit is refused.
    """
    logits = 4 * max_rows * vocab_size
    penalties = 5 * max_rows * vocab_size
    dry = min(8 * max_rows * table_places(context_length), _MOST_DRY)
    return scratch_bytes(max_rows, vocab_size, memory_bytes) + logits + penalties + dry


def first_largest(values: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the lowest id of the largest value, `top` [rows, 1]."""
    return (values == top).to(torch.uint8).argmax(dim=1)
