"""`SamplingRows`: parameters and state of open rows as the sampling kernel reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.sampling.record import ROW, ROW_FIELDS
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.sampling.runs import DecodeRuns
from realizar.backends.row_faults import check_logit_bias
from realizar.batch import OpenedRow
from realizar.sampling_params import SAMPLERS, SamplingParams

_MOST = (1 << 62) - 1
_SLOTS = tuple([(each.name, ROW[each.name], each.kind) for each in SAMPLERS])


class SamplingRows:
    """Rows by their number.

    Everything but two numbers of a row is derived from token ids, and so is rebuilt exactly from its history. Those two
    are the seed, where the parameters name none, and mirostat's mu (bits, at first twice tau), which depends on logits
    that no longer exist. So a preempted row stays open, and keeps them.

    Attributes:
        table: int64 [max_rows, fields of a row].
        logprobs: int64 [max_rows], most probable ids wanted with a token; -1 for none and no log-probability.
    """

    def __init__(self, max_rows: int, vocab_size: int, context_length: int) -> None:
        self._vocab_size, self._context_length = vocab_size, context_length
        self.table = aligned_zeros((max_rows, ROW_FIELDS), np.int64)
        self.table_address = address(self.table)
        self._decodes: dict[int, DecodeRuns] = {}  # by their number of rows
        self._version = 0  # another one once a row was opened or closed
        self._numbers = self.table.view(np.float64)
        self.logprobs = self.table[:, ROW["logprobs"]]
        self._held: dict[int, list[NDArray[Any]]] = {}
        for row in range(max_rows):
            self.close(row)

    def open(self, opened: OpenedRow) -> None:
        """Start a row; InvalidRequestError where `logit_bias` names an id beyond the vocabulary."""
        row, sampling = opened.row, opened.sampling
        check_logit_bias(sampling, self._vocab_size)
        self.close(row)
        held = self._held[row] = []
        self.table[row, ROW["seed"]] = np.uint64((sampling.seed or 0) % (1 << 64)).astype(np.int64)
        self._write(
            row, choice=opened.choice, greedy=sampling.greedy, min_tokens=sampling.min_tokens,
            ends_early=sampling.structured is not None, outputs=len(opened.history) - opened.num_prompt_tokens,
            logprobs=-1 if sampling.logprobs is None else min(sampling.logprobs, self._vocab_size),
        )  # fmt: skip
        self._numbers[row, ROW["mu"]] = 2.0 * sampling.mirostat_tau
        for name, slot, kind in _SLOTS:
            value = getattr(sampling, name)
            if kind is int:
                self.table[row, slot] = min(int(value), _MOST)
            else:
                self._numbers[row, slot] = value
        self._write_lists(row, sampling, held)
        if _penalises(sampling):
            self._write_counts(row, opened, held)
        if sampling.dry_multiplier > 0.0 and sampling.dry_penalty_last_n != 0:
            self._write_dry(row, opened, held)

    def begin_decodes(self, numbers: NDArray[np.intp], positions: NDArray[np.int32]) -> DecodeRuns:
        """The runs of a step in which rows sample a token each, good until the next step of as many rows.

        `numbers` are intp [rows], never written; `positions` [rows], of the tokens.
        """
        runs = self._decodes.get(len(numbers))
        if runs is None:
            runs = self._decodes[len(numbers)] = DecodeRuns(len(numbers))
        if not runs.names(numbers, self._version):
            runs.name_rows(numbers, self._version, self.addresses(numbers), self.logprobs[numbers])
        runs.begin(positions)
        return runs

    def addresses(self, numbers: NDArray[np.intp]) -> NDArray[np.int64]:
        """int64 [rows], where the kernel reads rows."""
        return self.table_address + numbers * self.table.strides[0]

    def follow_grammars(self, numbers: NDArray[np.intp]) -> bool:
        return bool(self.table[numbers, ROW["ends_early"]].any())

    def close(self, row: int) -> None:
        """Forget a row. Steps on their way may still name it: it is then a plain greedy one."""
        self._version += 1
        self._held.pop(row, None)
        self.table[row] = 0
        self._write(row, greedy=1, logprobs=-1)

    def _write(self, row: int, **values: int) -> None:
        for name, value in values.items():
            self.table[row, ROW[name]] = min(int(value), _MOST)

    def _hold(self, values: NDArray[Any], held: list[NDArray[Any]]) -> int:
        held.append(values)
        return address(values)

    def _write_lists(self, row: int, sampling: SamplingParams, held: list[NDArray[Any]]) -> None:
        end_ids = [token_id for token_id in sampling.stop_token_ids if 0 <= token_id < self._vocab_size]
        lists: tuple[tuple[str, str, Sequence[float], type], ...] = (
            ("bias_ids", "num_biases", tuple(sampling.logit_bias), np.int64),
            ("biases", "num_biases", tuple(sampling.logit_bias.values()), np.float64),
            ("end_ids", "num_ends", end_ids, np.int64),
            ("breakers", "num_breakers", sorted(sampling.dry_sequence_breakers), np.int64),
        )
        for name, count, values, kind in lists:
            if values:
                self._write(row, **{name: self._hold(np.array(values, kind), held), count: len(values)})

    def _write_counts(self, row: int, opened: OpenedRow, held: list[NDArray[Any]]) -> None:
        """Ids that were seen; those of the prompt matter to the repetition penalty alone."""
        history = np.array(opened.history, np.int64)
        output = np.arange(len(history)) >= opened.num_prompt_tokens
        inside = (history >= 0) & (history < self._vocab_size)  # else a placeholder for embeddings
        if opened.sampling.repetition_penalty == 1.0:
            inside &= output
        found, places = np.unique(history[inside], return_inverse=True)
        counted, counts = (np.empty(self._vocab_size, np.int32) for _ in range(2))  # the system gives what is written
        counted[: len(found)] = found
        counts[: len(found)] = np.bincount(places[output[inside]], minlength=len(found))
        self._write(row, counted=self._hold(counted, held), counts=self._hold(counts, held), num_counted=len(found))

    def _write_dry(self, row: int, opened: OpenedRow, held: list[NDArray[Any]]) -> None:
        window, history = opened.sampling.dry_penalty_last_n, opened.history
        tail = np.array(history if window < 0 else history[max(0, len(history) - window) :], np.int32)
        places = max(self._context_length, len(history)) + 1
        tokens, lengths = np.empty(places, np.int32), np.zeros(places + 1, np.int32)
        found = np.empty(places, np.float32)
        tokens[: len(tail)] = tail
        self._write(
            row, dry_tokens=self._hold(tokens, held), dry_lengths=self._hold(lengths, held),
            dry_found=self._hold(found, held), dry_size=len(tail), dry_places=places,
        )  # fmt: skip


def _penalises(sampling: SamplingParams) -> bool:
    others = sampling.presence_penalty, sampling.frequency_penalty
    return sampling.repetition_penalty != 1.0 or others != (0.0, 0.0)
