"""`NativeRows`: the parameters of open rows as the sampling kernels read them, and what the host knows of each. torch.

A row's parameters are one record in an array on the device, written when the row opens. Lists of a row (biases, end
ids) and its tables (counts of ids, DRY's tokens and match lengths) are tensors of its own, which the record points to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.native.sampling.source import sampler_integers, sampler_numbers
from realizar.backends.row_faults import check_logit_bias
from realizar.batch import OpenedRow
from realizar.sampling_params import SamplingParams
from realizar.stop_rule import StopRule

ADJUST, DRAW, CUT, HISTOGRAM, DEVIATION, DRY = 1, 2, 4, 8, 16, 32  # flags of a sampled token, as in sampling/rows.cu
MIROSTAT = 64  # of rows alone: the kernels read the row
_LARGEST_INT = (1 << 31) - 1

_POINTERS = ("bias_ids", "biases", "end_ids", "breakers", "counts", "dry_tokens", "dry_lengths", "dry_values")
_INTEGERS = (
    "choice", "num_biases", "num_ends", "num_breakers", "min_tokens", "dry_start", "dry_places", "num_prompt", "kinds",
)  # fmt: skip
_SAMPLERS = tuple([(each.name, each.kind) for each in (*sampler_numbers(), *sampler_integers())])
_NUM_INTEGERS = len(_INTEGERS) + len(sampler_integers())
ROW = np.dtype(
    [(name, np.uint64) for name in ("seed", *_POINTERS)]
    + [(name, np.float64 if kind is float else np.int32) for name, kind in _SAMPLERS]
    + [(name, np.int32) for name in _INTEGERS]
    + [("padding", np.int32)] * (_NUM_INTEGERS % 2)
)
"""`Row` of sampling/rows.cu."""

CountHistory = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Adds to a row's counts, int32 [vocab], the tokens of its history, int32, of which so many are prompt."""


class NativeRows:
    """Rows by their number.

    Attributes:
        table: uint8 [max_rows, bytes of a record], on the device. mu: float64 [max_rows], of mirostat.
        kinds: int64 [max_rows], flags that the row's parameters give each of its tokens; 0 for a plain greedy row.
        outputs: int64 [max_rows], tokens sampled so far, those not read back yet included, but for a row with drafts.
        min_tokens: int64 [max_rows], 0 where no id would end the output.
        follow_grammars: bool [max_rows].
        logprobs: int64 [max_rows], most probable ids wanted with a sampled one; -1 for none and no log-probability.
        num_changes: how often a row was opened or closed.
        forbids_ends, wants_logprobs, any_follows: whether any row has `min_tokens`, wants log-probabilities, or follows
            a grammar.
    """

    def __init__(self, max_rows: int, vocab_size: int, context_length: int, device: torch.device) -> None:
        self._vocab_size, self._places, self._device = vocab_size, table_places(context_length), device
        self.table = torch.zeros((max_rows, ROW.itemsize), dtype=torch.uint8, device=device)
        self.mu = torch.zeros(max_rows, dtype=torch.float64, device=device)
        self.kinds = np.zeros(max_rows, np.int64)
        self.outputs, self.min_tokens = np.zeros(max_rows, np.int64), np.zeros(max_rows, np.int64)
        self._num_prompts = np.zeros(max_rows, np.int64)
        self.logprobs = np.full(max_rows, -1, np.int64)
        self.follow_grammars = np.zeros(max_rows, np.bool_)
        self.num_changes = 0
        self.forbids_ends = self.wants_logprobs = self.any_follows = False
        self._samplings: dict[int, SamplingParams] = {}
        self._stop_rule = StopRule(max_rows)
        self._held: dict[int, list[torch.Tensor]] = {}

    def open(self, opened: OpenedRow, count_history: CountHistory) -> None:
        """Start a row; InvalidRequestError where `logit_bias` names an id beyond the vocabulary."""
        self.num_changes += 1
        row, sampling = opened.row, opened.sampling
        check_logit_bias(sampling, self._vocab_size)
        record = np.zeros((), ROW)
        held: list[torch.Tensor] = []
        self._write_numbers(record, opened)
        self._write_lists(record, sampling, held)
        if _penalises(sampling):
            counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
            if opened.history:
                count_history(counts, self._send(opened.history, np.int32), opened.num_prompt_tokens)
            held.append(counts)
            record["counts"] = counts.data_ptr()
        if _has_dry(sampling):
            self._write_dry(record, opened, held)
        self._held[row], self._samplings[row] = held, sampling
        self._stop_rule.open(row, sampling.stop_token_ids, sampling.least_tokens)
        self.kinds[row] = record["kinds"]
        self.outputs[row] = len(opened.history) - opened.num_prompt_tokens
        self._num_prompts[row] = opened.num_prompt_tokens
        self.min_tokens[row] = sampling.min_tokens if record["num_ends"] else 0
        self.follow_grammars[row] = sampling.structured is not None
        self.logprobs[row] = -1 if sampling.logprobs is None else sampling.logprobs
        self.table[row].copy_(torch.from_numpy(record.reshape(1).view(np.uint8)), non_blocking=True)
        if sampling.mirostat:
            self.mu[row] = 2.0 * sampling.mirostat_tau
        self._note_wishes()

    def close(self, row: int) -> None:
        """Forget a row; what steps on their way read of its tables is freed after them, on their stream."""
        self.num_changes += 1
        self._held.pop(row, None)
        self._samplings.pop(row, None)
        self._stop_rule.close(row)
        self.kinds[row], self.min_tokens[row], self.logprobs[row] = 0, 0, -1
        self.follow_grammars[row] = False
        self._note_wishes()

    def _note_wishes(self) -> None:
        self.forbids_ends, self.any_follows = bool(self.min_tokens.any()), bool(self.follow_grammars.any())
        self.wants_logprobs = bool((self.logprobs >= 0).any())

    def flags_of(self, numbers: NDArray[np.integer[Any]], positions: NDArray[np.integer[Any]]) -> int:
        """Flags of rows' next tokens at these positions, all together, as `list_sampled` finds them without masks."""
        flags = int(np.bitwise_or.reduce(self.kinds[numbers]))
        if self.forbids_ends and np.count_nonzero(positions - self._num_prompts[numbers] < self.min_tokens[numbers]):
            flags |= ADJUST
        return flags

    def take_in(
        self, numbers: NDArray[np.intp], sampled: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Count the sampled tokens of rows with drafts once the host has read them; see `TakeIn`."""
        places = self.outputs[numbers][:, None] + np.arange(sampled.shape[1])
        counts, ended = self._stop_rule.kept(numbers, sampled, places)
        self.outputs[numbers] += counts
        return counts, ended

    def without_ends(self, row: int, mask: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """A grammar's mask, uint32 [words], less the ids that end the output, unless it allows nothing else."""
        ends = self._end_ids(self._samplings[row])
        fewer = mask.copy()
        np.bitwise_and.at(fewer, ends // 32, ~(np.uint32(1) << (ends % 32).astype(np.uint32)))
        return fewer if fewer.any() else mask

    def _end_ids(self, sampling: SamplingParams) -> NDArray[np.int32]:
        return np.array([i for i in sampling.stop_token_ids if 0 <= i < self._vocab_size], np.int32)

    def _write_numbers(self, record: NDArray[np.void], opened: OpenedRow) -> None:
        sampling = opened.sampling
        for name, kind in _SAMPLERS:
            value = getattr(sampling, name)
            record[name] = value if kind is float else min(value, _LARGEST_INT)
        record["choice"], record["num_prompt"] = opened.choice, opened.num_prompt_tokens
        record["min_tokens"], record["kinds"] = min(sampling.min_tokens, _LARGEST_INT), kinds_of(sampling)
        record["seed"] = (sampling.seed or 0) % (1 << 64)

    def _write_lists(self, record: NDArray[np.void], sampling: SamplingParams, held: list[torch.Tensor]) -> None:
        lists: list[tuple[str, str, Sequence[float] | NDArray[np.int32], type]] = [
            ("bias_ids", "num_biases", tuple(sampling.logit_bias), np.int32),
            ("biases", "num_biases", tuple(sampling.logit_bias.values()), np.float64),
            ("end_ids", "num_ends", self._end_ids(sampling) if sampling.min_tokens else (), np.int32),
            ("breakers", "num_breakers", sorted(sampling.dry_sequence_breakers), np.int32),
        ]
        for name, count, values, kind in lists:
            if len(values):
                held.append(self._send(values, kind))
                record[name], record[count] = held[-1].data_ptr(), len(values)

    def _write_dry(self, record: NDArray[np.void], opened: OpenedRow, held: list[torch.Tensor]) -> None:
        """Make DRY's tables, whose size is `dry_start` and the number of tokens sampled."""
        sampling, history = opened.sampling, opened.history
        window = sampling.dry_penalty_last_n
        tail = list(history if window < 0 else history[max(0, len(history) - window) :])
        matches = suffix_matches(tail, frozenset(sampling.dry_sequence_breakers))
        tokens, lengths = (torch.zeros(self._places + 1, dtype=torch.int32, device=self._device) for _ in range(2))
        tokens[: len(tail)].copy_(self._send(tail, np.int32))
        lengths[1 : len(tail) + 1].copy_(self._send(matches, np.int32))
        values = torch.empty(self._places, dtype=torch.float32, device=self._device)
        held += [tokens, lengths, values]
        for name, tensor in zip(("dry_tokens", "dry_lengths", "dry_values"), (tokens, lengths, values), strict=True):
            record[name] = tensor.data_ptr()
        record["dry_start"] = len(tail) - (len(history) - opened.num_prompt_tokens)
        record["dry_places"] = self._places

    def _send(self, values: Sequence[float] | NDArray[np.int32], kind: type) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, kind)).to(self._device, non_blocking=True)


def kinds_of(sampling: SamplingParams) -> int:
    """Flags of a row's sampled tokens, those of `min_tokens` and of a grammar apart."""
    kinds = 0
    if sampling.logit_bias or _penalises(sampling):
        kinds |= ADJUST
    if _has_dry(sampling):
        kinds |= ADJUST | DRY
    if sampling.greedy:
        return kinds
    kinds |= DRAW
    if sampling.mirostat:
        return kinds | CUT | MIROSTAT
    typical, sigma = sampling.typical_p < 1.0, sampling.top_n_sigma > 0.0
    by_mass = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.xtc_probability > 0.0 or (typical and not sigma)
    if by_mass or typical or sigma or sampling.min_p > 0.0:
        kinds |= CUT
    return kinds | HISTOGRAM * by_mass | DEVIATION * sigma


def _penalises(sampling: SamplingParams) -> bool:
    others = sampling.presence_penalty, sampling.frequency_penalty
    return sampling.repetition_penalty != 1.0 or others != (0.0, 0.0)


def _has_dry(sampling: SamplingParams) -> bool:
    return sampling.dry_multiplier > 0.0 and sampling.dry_penalty_last_n != 0


def table_places(context_length: int) -> int:
    """Tokens that a row's table has room for: a whole request, and what steps on their way sample after its end."""
    return context_length + 16


def suffix_matches(tokens: Sequence[int], breakers: frozenset[int]) -> list[int]:
    """For each place, how many tokens ending there equal those at the end; 0 at the end, none over a breaker."""
    size, backwards = len(tokens), list(tokens)[::-1]
    limit = next((place for place, token in enumerate(backwards) if token in breakers), size)
    lengths, left, right = [0] * size, 0, 0
    for place in range(1, size):
        length = min(lengths[place - left], right - place) if place < right else 0
        while place + length < size and backwards[length] == backwards[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return [min(length, limit) for length in reversed(lengths)]
