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
from realizar.backends.cuda.sampling.penalties import PenaltyTable, add_bias
from realizar.batch import OpenedRow
from realizar.errors import InvalidRequestError
from realizar.sampling_params import SamplingParams

NONE_ALLOWED = -3  # in place of the choice of a row all of whose ids are forbidden; any other below 0: unusable logits
SCRATCH_BYTES_PER_ID = 128  # float64 copies of a row's logits, the order of a sort and what sorting takes, at most
_LEAST_SCRATCH, _MOST_SCRATCH = 256 << 20, 2 << 30
_MOST_DRY = 128 << 20


@dataclass(slots=True)
class RowState:
    """What the host knows of an open row.

    Attributes:
        seed, choice: of its random numbers.
        num_output_tokens: chosen so far, those not read back yet included.
    """

    sampling: SamplingParams
    seed: int
    choice: int
    num_output_tokens: int
    end_ids: tuple[int, ...]

    @property
    def ending_forbidden(self) -> bool:
        return bool(self.end_ids) and self.num_output_tokens < self.sampling.min_tokens


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
        beyond = [token_id for token_id in sampling.logit_bias if not 0 <= token_id < self._vocab_size]
        if beyond:
            message = f"logit_bias names token id {beyond[0]}; the vocabulary has {self._vocab_size} ids"
            raise InvalidRequestError(message, "logit_bias")
        seed = philox.fresh_seed() if sampling.seed is None else sampling.seed
        ends = tuple(i for i in sampling.stop_token_ids if 0 <= i < self._vocab_size)
        num_output_tokens = len(opened.history) - opened.num_prompt_tokens
        self._rows[row] = RowState(sampling, seed, opened.choice, num_output_tokens, ends)
        if sampling.logprobs is not None:
            self._logprob_rows.add(row)
        self._penalties.open(opened)
        self._dry.open(opened)
        if sampling.mirostat:
            self._mirostat_mu[row] = 2.0 * sampling.mirostat_tau

    def close(self, row: int) -> None:
        self._rows.pop(row, None)
        self._logprob_rows.discard(row)
        self._penalties.close(row)
        self._dry.close(row)

    @property
    def wants_logprobs(self) -> bool:
        """Whether any open row asks for log-probabilities of its choices."""
        return bool(self._logprob_rows)

    def sampling_of(self, row: int) -> SamplingParams:
        return self._rows[row].sampling

    def ends(self, row: int, token_id: int) -> bool:
        """Whether the output ends with this token, the last one chosen; a grammar ends it before `min_tokens` too."""
        state = self._rows[row]
        late = state.num_output_tokens > state.sampling.min_tokens or state.sampling.structured is not None
        return late and token_id in state.sampling.stop_token_ids

    def takes_largest(self, row: int) -> bool:
        """Whether the row's choice, unless masked, is the largest logit as the model gave it."""
        state = self._rows[row]
        changed = state.sampling.logit_bias or self._penalties.active(row) or self._dry.active(row)
        return state.sampling.greedy and not changed and not state.ending_forbidden

    def note_largest(self, row: int) -> None:
        """Count a token that was chosen without `sample`."""
        self._rows[row].num_output_tokens += 1

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int],
        masks: Mapping[int, NDArray[np.uint32]],
    ) -> torch.Tensor:  # fmt: skip
        """int64 [rows] on the device: the choices, taken into the rows' state.

        -1 where the logits can't be used, NONE_ALLOWED where every id is forbidden. If choosing raises, no row has
        changed.

        Args:
            logits: float32 [rows, vocab], left as they are.
            positions: index in its sequence of each token being chosen.
            masks: uint32 [ceil(vocab / 32)] by row.

        Raises:
            torch.OutOfMemoryError: there is not as much memory as was to be kept free.
        """
        groups = [slice(first, first + self.rows_at_once) for first in range(0, len(rows), self.rows_at_once)]
        mirostat_mu = self._mirostat_mu.clone()
        chosen = [self._choose(logits[each], rows[each], positions[each], masks, mirostat_mu) for each in groups]
        # Every group has its choices, so that nothing of one row's parameters can raise any more.
        self._mirostat_mu = mirostat_mu
        for each, (_, taken) in zip(groups, chosen, strict=True):
            self._accept(rows[each], taken)
        return chosen[0][0] if len(chosen) == 1 else torch.cat([found for found, _ in chosen])

    def _accept(self, rows: Sequence[int], choices: torch.Tensor) -> None:
        """Take choices, all of them ids, into the rows' state."""
        for row in rows:
            self._rows[row].num_output_tokens += 1
        self._penalties.accept(rows, choices)
        self._dry.accept(rows, choices)

    def _choose(
        self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int],
        masks: Mapping[int, NDArray[np.uint32]], mirostat_mu: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """int64 [rows] twice: what `sample` gives, and ids for the rows' state, of which only `mirostat_mu` changes."""
        forbidding = any(row in masks or self._rows[row].ending_forbidden for row in rows)
        adjusted = self._adjust(logits, rows, masks)
        top = adjusted.max(dim=1, keepdim=True).values
        usable = torch.isfinite(top[:, 0])
        choices = first_largest(adjusted, top)
        drawn = [index for index, row in enumerate(rows) if not self._rows[row].sampling.greedy]
        if drawn:
            these = torch.tensor(drawn, device=self._device)
            part = torch.where(usable[these, None], adjusted[these], 0.0)
            choices[these] = self._draw(part, [rows[i] for i in drawn], [positions[i] for i in drawn], mirostat_mu)
        found = torch.where(usable, choices, -1)
        return torch.where(torch.isneginf(top[:, 0]), NONE_ALLOWED, found) if forbidding else found, choices

    def _adjust(
        self, logits: torch.Tensor, rows: Sequence[int], masks: Mapping[int, NDArray[np.uint32]]
    ) -> torch.Tensor:
        """Logits, float32, with all that acts on single ids applied."""
        adjusted = logits.clone()
        masked = [index for index, row in enumerate(rows) if row in masks]
        if masked:
            words = torch.from_numpy(np.stack([masks[rows[i]] for i in masked]).view(np.int32)).to(self._device)
            bits = (words[:, :, None] >> torch.arange(32, device=self._device)) & 1
            allowed = bits.reshape(len(masked), -1)[:, : self._vocab_size].bool()
            these = torch.tensor(masked, device=self._device)
            adjusted[these] = torch.where(allowed, adjusted[these], float("-inf"))
        self._forbid_ends(adjusted, rows, masks)
        entries = [
            (index, token_id, value)
            for index, row in enumerate(rows)
            for token_id, value in self._rows[row].sampling.logit_bias.items()
        ]
        if entries:
            add_bias(adjusted, entries)
        self._penalties.apply(adjusted, rows)
        self._dry.apply(adjusted, rows)
        return adjusted

    def _forbid_ends(self, adjusted: torch.Tensor, rows: Sequence[int], masks: Mapping[int, object]) -> None:
        """End ids before `min_tokens`, unless a grammar leaves nothing else."""
        for index, row in enumerate(rows):
            state = self._rows[row]
            if not state.ending_forbidden:
                continue
            ends = torch.tensor(state.end_ids, device=self._device)
            kept = adjusted[index, ends]
            adjusted[index, ends] = float("-inf")
            if row in masks:
                adjusted[index, ends] = torch.where(adjusted[index].max() == float("-inf"), kept, float("-inf"))

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[int], positions: Sequence[int], mirostat_mu: torch.Tensor
    ) -> torch.Tensor:
        """int64 [rows]; the rows' values in `mirostat_mu`, float64 [max_rows], become those of the next choice."""
        states = [self._rows[row] for row in rows]
        uniforms = self._uniforms(states, positions, philox.DRAW_TOKEN)
        acts = [
            state.sampling.xtc_probability > 0.0
            and not state.sampling.mirostat
            and philox.uniform(state.seed, state.choice, position, philox.DRAW_XTC) < state.sampling.xtc_probability
            for state, position in zip(states, positions, strict=True)
        ]
        samplings = [state.sampling for state in states]
        mirostat = [index for index, sampling in enumerate(samplings) if sampling.mirostat]
        if not mirostat:
            return truncation.draw_truncated(logits, samplings, acts, uniforms)
        choices = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        others = [index for index, sampling in enumerate(samplings) if not sampling.mirostat]
        if others:
            these = torch.tensor(others, device=self._device)
            choices[these] = truncation.draw_truncated(
                logits[these], [samplings[i] for i in others], [acts[i] for i in others], uniforms[these]
            )
        these = torch.tensor(mirostat, device=self._device)
        table_rows = torch.tensor([rows[i] for i in mirostat], device=self._device)
        chosen, mirostat_mu[table_rows] = truncation.draw_mirostat(
            logits[these], [samplings[i] for i in mirostat], mirostat_mu[table_rows], uniforms[these]
        )
        choices[these] = chosen
        return choices

    def _uniforms(self, states: Sequence[RowState], positions: Sequence[int], draw: int) -> torch.Tensor:
        values = [
            philox.uniform(state.seed, state.choice, position, draw)
            for state, position in zip(states, positions, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float64, device=self._device)


def scratch_bytes(max_rows: int, vocab_size: int, memory_bytes: int) -> int:
    """What sampling may take at once beside its tables, on a device with so much memory."""
    most = min(max(memory_bytes // 64, _LEAST_SCRATCH), _MOST_SCRATCH)
    return min(most, max_rows * vocab_size * SCRATCH_BYTES_PER_ID)


def reserved_bytes(max_rows: int, vocab_size: int, context_length: int, memory_bytes: int) -> int:
    """What the KV cache must leave to sampling: scratch, logits put together, tables of penalties, and some of DRY's.

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
