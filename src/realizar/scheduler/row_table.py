"""`RowTable`: the state of all sequences that have a row, one column for each fact, indexed by the row's number.

A step reads and writes columns with a few operations for all its rows; `Sequence`, one choice of a request, shows the
same numbers for one. `RowPool` hands out the rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from realizar.batch import FROM_PREVIOUS_STEP, GIVEN_EMBEDDING, LogprobQuery, OpenedRow, StepRows
from realizar.kv_cache.block_keys import BlockKeys
from realizar.outputs import NO_DRAFTS, NO_SNAPSHOTS
from realizar.request import PromptEmbeddings, Request
from realizar.stop_rule import StopRule, up_to_end

_NOBODY = -1  # in place of the number of a sequence

Rows = NDArray[np.intp]
Column = NDArray[np.int32]


class RowTable:
    """The columns.

    Attributes:
        sequence_ids: int64 [rows], the scheduler's number of the sequence in each row, -1 where there is none.
        token_ids: int32 [rows, context], prompt and output as far as known, then drafts that wait to be scheduled;
            memory is used as it is written.
        num_known: int32 [rows], how many of them are known.
        num_pending: int32 [rows], sampled tokens of submitted steps that are not known yet, drafts apart.
        num_computed: int32 [rows], tokens in the KV cache once every submitted step is done, drafts in flight included.
        num_drafts, num_proposed: int32 [rows], drafts in flight, and those that wait to be scheduled.
        most_tokens: int32 [rows], the number of tokens at which no further one is wanted.
        samples: bool [rows], tokens are wanted after the prompt.
        is_running: bool [rows], the row holds blocks.
        chosen: int64 [rows], greater the later the row was chosen last to decode before others.
        may_repeat: int32 [rows], 1 where the token before a sampled one may be computed again and the model has a
            state.
        given_end: int32 [rows], the number of tokens up to the last one that has a given embedding.
    """

    def __init__(self, num_rows: int, context_length: int, *, has_state: bool = False) -> None:
        self._has_state = has_state
        self.sequence_ids = np.full(num_rows, _NOBODY, np.int64)
        self.token_ids = np.zeros((num_rows, context_length), np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_pending = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.num_drafts = np.zeros(num_rows, np.int32)
        self.num_proposed = np.zeros(num_rows, np.int32)
        self.most_tokens = np.zeros(num_rows, np.int32)
        self.samples = np.zeros(num_rows, np.bool_)
        self.is_running = np.zeros(num_rows, np.bool_)
        self.chosen = np.zeros(num_rows, np.int64)
        self.may_repeat = np.zeros(num_rows, np.int32)
        self.given_end = np.zeros(num_rows, np.int32)
        self._given: dict[int, list[tuple[int, NDArray[np.float32], bool]]] = {}  # by row; see `open`
        self._stop_rule = StopRule(num_rows)

    def open(self, row: int, sequence_id: int, token_ids: Column, request: Request) -> None:
        """Give a row to a sequence of which nothing is computed. `token_ids` are all that are known, int32 [tokens]."""
        sampling, embeddings = request.sampling, request.embeddings
        self.sequence_ids[row] = sequence_id
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_known[row] = len(token_ids)
        for column in (self.num_pending, self.num_computed, self.num_drafts, self.num_proposed):
            column[row] = 0
        self.may_repeat[row] = sampling.structured is not None and self._has_state  # see `Scheduler.defer`
        self.most_tokens[row] = request.num_prompt_tokens + max(request.max_tokens, 1)  # scoring never gets there
        self.samples[row] = request.max_tokens > 0
        self._stop_rule.open(row, sampling.stop_token_ids, request.num_prompt_tokens + sampling.least_tokens)
        self.given_end[row] = embeddings[-1].end if embeddings else 0
        if embeddings:
            values = [np.frombuffer(run.values, np.float32).reshape(run.num_tokens, -1) for run in embeddings]
            self._given[row] = [
                (run.start, each, run.is_seen_whole) for run, each in zip(embeddings, values, strict=True)
            ]

    def close(self, row: int) -> None:
        """Take the row from its sequence: results of submitted steps are nobody's."""
        self.sequence_ids[row], self.is_running[row] = _NOBODY, False
        self._stop_rule.close(row)
        self._given.pop(row, None)
        self.given_end[row] = 0

    def are_open(self, step: StepRows) -> NDArray[np.bool_]:
        """bool [rows], true where the sequence of a step's row has not ended, nor left the row."""
        found: NDArray[np.bool_] = self.sequence_ids[step.numbers] == step.sequence_ids
        return found

    def num_remaining(self, rows: Rows) -> Column:
        """Tokens to compute before each row's next sampled one; 0 where none is wanted, or drafts are in flight."""
        num_tokens = self.num_known[rows] + self.num_pending[rows]
        remaining = num_tokens - self.num_computed[rows]
        remaining[num_tokens >= self.most_tokens[rows]] = 0
        remaining[self.num_drafts[rows].astype(np.bool_)] = 0
        return remaining

    def go_on(self, step: StepRows) -> NDArray[np.bool_]:
        """bool [rows]: rows of a step that have their last token known, alone to compute, and room for a draft."""
        rows = step.numbers
        waits = (self.num_remaining(rows) == 1) & (self.num_pending[rows] == 0)
        room = self.most_tokens[rows] - 1 > self.num_known[rows]
        found: NDArray[np.bool_] = self.are_open(step) & self.is_running[rows] & waits & room
        return found

    def advance(self, rows: Rows, counts: Column | None = None, num_drafts: Column | None = None) -> StepRows:
        """Schedule the next tokens of rows, and the one sampled after them; from now on they count as computed.

        `counts` of tokens include drafts, the last ones of a row. Without them each row decodes, without drafts.
        """
        computed = self.num_computed[rows]
        if counts is None or num_drafts is None:
            token_ids = self.token_ids[rows, computed]
            token_ids[computed >= self.num_known[rows]] = FROM_PREVIOUS_STEP
            self.num_computed[rows] = computed + 1
            self.num_pending[rows] += 1
            uncertain = self.may_repeat[rows] if self._has_state else None
            decodes = StepRows.of_decodes(self.sequence_ids[rows], rows, computed, token_ids, uncertain)
            return self._with_given(decodes)
        samples = self.samples[rows] & (counts - num_drafts == self.num_remaining(rows))
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(starts[-1], dtype=np.int32) + np.repeat(computed - starts[:-1], counts)
        token_ids = self.token_ids[np.repeat(rows, counts), positions]
        token_ids[positions >= np.repeat(self.num_known[rows] + num_drafts, counts)] = FROM_PREVIOUS_STEP
        self.num_computed[rows] = computed + counts
        self.num_pending[rows] += samples
        self.num_drafts[rows], self.num_proposed[rows] = num_drafts, 0
        uncertain = num_drafts + self.may_repeat[rows] * samples if self._has_state else num_drafts
        return self._with_given(
            StepRows(self.sequence_ids[rows], rows, computed, token_ids, starts, samples, num_drafts, uncertain)
        )

    def _with_given(self, step: StepRows) -> StepRows:
        if not self._given:
            return step
        found: list[tuple[int, NDArray[np.float32]]] = []
        images: list[tuple[int, int]] = []
        for index in (step.num_computed_tokens < self.given_end[step.numbers]).nonzero()[0].tolist():
            start, end = int(step.num_computed_tokens[index]), int(step.num_context_tokens[index])
            for first, values, is_whole in self._given[int(step.numbers[index])]:
                if first < end and start < first + len(values):
                    at = int(step.starts[index]) + max(first - start, 0)
                    found.append((at, values[max(start - first, 0) : end - first]))
                    images += [(at, len(found[-1][1]))] if is_whole else []
        return replace(step, embeddings=tuple(found), images=tuple(images)) if found else step

    def computed_again(self, step: StepRows, rows: NDArray[np.bool_]) -> StepRows:
        """The step, in which some decodes, bool [rows], compute the last known token of their row."""
        numbers, firsts = step.numbers[rows], step.starts[:-1][rows]
        token_ids, computed = step.token_ids.copy(), step.num_computed_tokens.copy()
        token_ids[firsts] = self.token_ids[numbers, self.num_known[numbers] - 1]
        computed[rows] -= 1
        return self._with_given(replace(step, token_ids=token_ids, num_computed_tokens=computed))

    def append_tokens(
        self, rows: Rows, sampled: NDArray[np.int32]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_], NDArray[np.bool_]]:
        """Append to each row its sampled tokens up to the one that ends it: the rule by which outputs end.

        `sampled` is int32 [rows, 1 + drafts], at least one token of each row, NOT_SAMPLED after its last. Returns, all
        [rows]: how many were appended, whether the last is a stop id that counts, whether no further one is wanted.
        """
        known, width = self.num_known[rows], sampled.shape[1]
        positions: Column = np.add(known[:, None], np.arange(width, dtype=np.int32))
        stops = self._stop_rule.stops(rows, sampled, positions)
        full = positions + 1 >= self.most_tokens[rows][:, None]
        if width == 1:
            counts, stopped, is_full = np.ones(len(rows), np.intp), stops[:, 0], full[:, 0]
            self.token_ids[rows, known] = sampled[:, 0]
        else:
            counts = up_to_end(sampled, stops | full)
            index, at = (np.arange(width) < counts[:, None]).nonzero()
            self.token_ids[rows[index], positions[index, at]] = sampled[index, at]
            last = np.arange(len(rows)), counts - 1
            stopped, is_full = stops[last], full[last]
        self.num_known[rows] = known + counts
        self.num_pending[rows] -= 1
        return counts, stopped, is_full


class Sequence:
    """One choice of a request while it is in the scheduler; its numbers are those of its row, see `RowTable`.

    Attributes:
        sequence_id: never used twice.
        turn: its place in the order of starts, see `Turns`.
        keys: of its full blocks.
        row: from its first step on; a preempted sequence keeps it, and with it the sampler's state.
        num_queried: prompt positions whose log-probabilities have been asked for.
        snapshot_positions: numbers of tokens, ascending and not computed yet, after each of which a snapshot is taken.
        num_cached_tokens: prompt tokens found in the prefix cache when it first entered a step.
    """

    def __init__(self, sequence_id: int, request: Request, choice: int, keys: BlockKeys, table: RowTable) -> None:
        self.sequence_id, self.request, self.choice, self.keys = sequence_id, request, choice, keys
        self.turn = 0.0
        self.row: int | None = None
        self.num_queried = self.num_cached_tokens = 0
        self.snapshot_positions: list[int] = []
        self.snapshots, self.drafts = NO_SNAPSHOTS, NO_DRAFTS
        self.scheduled_s: float | None = None
        self._table = table
        self._history = np.array(request.prompt_token_ids, np.int32)  # while it has no row

    @property
    def own_row(self) -> int:
        if self.row is None:
            raise RuntimeError("a sequence that was in no step has no row")
        return self.row

    def take_row(self, row: int) -> None:
        self.row = row
        self._table.open(row, self.sequence_id, self._history, self.request)

    def leave_row(self) -> None:
        self._history = self.token_ids.copy()
        self._table.close(self.own_row)
        self.row = None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [known tokens], prompt and output; not to be changed."""
        if self.row is None:
            return self._history
        return self._table.token_ids[self.row, : self._table.num_known[self.row]]

    @property
    def running(self) -> bool:
        return self.row is not None and self._table.is_running.item(self.row)

    @property
    def num_computed_tokens(self) -> int:
        return 0 if self.row is None else self._table.num_computed.item(self.row)

    @property
    def num_pending(self) -> int:
        return 0 if self.row is None else self._table.num_pending.item(self.row)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_chunk_tokens(self) -> int:
        """Tokens that the next step may compute: those before the next sampled one, or up to the next snapshot."""
        remaining = self._table.num_remaining(np.array([self.own_row])).item()
        positions = self.snapshot_positions
        return min(remaining, positions[0] - self.num_computed_tokens) if positions else remaining

    @property
    def num_image_tokens(self) -> int:
        """Tokens up to the end of the image that is seen whole of which the next one is; 0 if it is of none."""
        image = self._image_after(self.num_computed_tokens)
        return 0 if image is None else image.end - self.num_computed_tokens

    def chunk(self, wanted: int, most: int) -> int:
        """Tokens of a chunk that ends in no image that is seen whole: `wanted` ones, or fewer where one begins among
        them; up to `most` ones where the first token is of such an image, and 0 where it has more.
        """
        start = self.num_computed_tokens
        image = self._image_after(start + wanted) if wanted > 0 else None
        if image is None or image.start == start + wanted:
            return wanted
        if image.start > start:
            return image.start - start
        return image.end - start if image.end - start <= most else 0

    def _image_after(self, place: int) -> PromptEmbeddings | None:
        """The image that is seen whole of which the token after so many is."""
        runs = (run for run in self.request.embeddings if run.is_seen_whole)
        return next((run for run in runs if run.start <= place < run.end), None)

    @property
    def most_cached_tokens(self) -> int:
        return most_cached_tokens(self.request, len(self.token_ids), self.choice, self.num_queried)

    @property
    def max_drafts(self) -> int:
        """Drafts that may follow the last known token: another token follows the last draft."""
        return self._table.most_tokens.item(self.own_row) - len(self.token_ids) - 1

    def propose(self, drafts: tuple[int, ...]) -> None:
        """Let drafts follow its last token, which is known and alone to compute."""
        row, known = self.own_row, len(self.token_ids)
        self._table.token_ids[row, known : known + len(drafts)] = drafts
        self._table.num_proposed[row] = len(drafts)

    def take_queries(self, count: int) -> tuple[LogprobQuery, ...]:
        """Prompt positions to score among the next `count` tokens; not asked for again after preemption."""
        wanted = self.request.sampling.prompt_logprobs
        if wanted is None or self.choice > 0:
            return ()
        start, prompt = self.num_computed_tokens, self.request.prompt_token_ids
        end = min(start + count, len(prompt) - 1)
        first = max(start, self.num_queried)
        self.num_queried = max(self.num_queried, end)
        return tuple(LogprobQuery(at - start, prompt[at + 1], wanted) for at in range(first, end))

    def opened(self) -> OpenedRow:
        request, history = self.request, self.token_ids.tolist()
        for run in request.embeddings:
            history[run.start : run.end] = [GIVEN_EMBEDDING] * run.num_tokens
        return OpenedRow(
            self.sequence_id, self.own_row, request.sampling, tuple(history), request.num_prompt_tokens, self.choice,
            request.rope_positions,
        )  # fmt: skip


class RowPool:
    """Hands out the backend's rows, the smallest first at the start, none while a submitted step still names it."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._steps = np.zeros(num_rows, np.int32)  # that name each row
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_released(self) -> int:
        """Rows that will be free when steps are done, or the backend has closed them."""
        return len(self._released)

    def take(self) -> int:
        """The caller has checked `num_free`."""
        return self._free.pop()

    def submitted(self, rows: Rows) -> None:
        """Note that a step with these rows, all different, was submitted."""
        self._steps[rows] += 1

    def finished(self, rows: Rows) -> None:
        """Note that a step with these rows, all different, is done, or was given up."""
        self._steps[rows] -= 1

    def release(self, row: int) -> None:
        """Give up a row whose sequence has ended or left it."""
        self._released.append(row)

    def take_released(self) -> list[int]:
        """The released rows that no step names, to be closed in the backend; from now on they are free."""
        if not self._released:
            return []  # in nearly every step
        closed = [row for row in self._released if not self._steps[row]]
        self._released = [row for row in self._released if self._steps[row]]
        self._free.extend(reversed(closed))
        return closed

    def audit(self, owned: Iterable[int]) -> None:
        """Prove that each row is free, `owned` or released, and steps are counted rightly. RuntimeError."""
        rows = sorted([*self._free, *owned, *self._released])
        if rows != list(range(len(self._steps))):
            raise RuntimeError(f"rows {rows} are free, owned or released, of {len(self._steps)}")
        if (self._steps < 0).any() or self._steps[self._free].any():
            raise RuntimeError("a row has ended more steps than it was in, or is free within one")


def most_cached_tokens(request: Request, num_tokens: int, choice: int = 0, num_queried: int = 0) -> int:
    """Of so many tokens of a choice those that may come from cached blocks: not the last one, any that a mean needs, or
    that is to be scored; `num_queried` have been.
    """
    if request.pooling == "mean":
        return 0
    scored = choice == 0 and request.sampling.prompt_logprobs is not None
    return num_queried if scored and num_queried < request.num_prompt_tokens - 1 else num_tokens - 1
