"""Drafts: tokens that may follow a sequence, verified by the model in one step. numpy only.

A backend may propose drafts too, which come with the results of its steps.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListOf
from contextlib import contextmanager
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realizar.batch import PROPOSED, ProposedDrafts, StepRows
from realizar.errors import InvalidRequestError
from realizar.outputs import DraftUse
from realizar.scheduler.row_table import Rows, Sequence

_BYTES = 4  # of a token id
_LOG = logging.getLogger(__name__)


class Drafter(Protocol):
    """Proposes drafts for a batch of sequences at once.

    Each draft is verified with the row's own sampler, so that a drafter changes how many steps a text takes and never
    its tokens. Drafts beyond `speculative_tokens` are dropped, as are those from the first one on that is no id of the
    vocabulary. The drafter finds what it needs of a sequence by `sequence_id`, `row` and `token_ids`, and keeps its own
    state under `sequence_id`.

    Attributes:
        awaits_results: a step's results are awaited before the next step, since drafts follow from ids that the host
            must know. False lets steps stay in flight; only sequences whose last token is known have drafts then.
    """

    awaits_results: bool

    def propose(self, sequences: ListOf[Sequence]) -> list[tuple[int, ...]]:
        """Up to `max_drafts` drafts of each sequence, of which only the last token is left to compute, and known."""

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Take in that `num_drafts` drafts of a sequence were verified and the first `num_accepted` accepted."""

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended; unknown ids pass."""


class PromptLookup:
    """Drafts go on with the request's prediction, where the answer is within it.

    Elsewhere they are the tokens that followed the last `shortest` to `longest` tokens where they stood before.
    """

    def __init__(self, most_tokens: int, longest: int, shortest: int) -> None:
        self.awaits_results = True
        self._most_tokens, self._longest, self._shortest = most_tokens, longest, shortest
        self._lookups: dict[int, DraftLookup] = defaultdict(lambda: DraftLookup(most_tokens, longest, shortest))
        self._predictions: dict[int, Prediction] = {}
        self._predicted: set[int] = set()  # ids of sequences whose last drafts their prediction gave

    def propose(self, sequences: ListOf[Sequence]) -> list[tuple[int, ...]]:
        return [self._of_prediction(each) or self._of_history(each) for each in sequences]

    def _of_history(self, sequence: Sequence) -> tuple[int, ...]:
        return self._lookups[sequence.sequence_id].propose(sequence.token_ids, sequence.max_drafts)

    def _of_prediction(self, sequence: Sequence) -> tuple[int, ...]:
        number, request = sequence.sequence_id, sequence.request
        self._predicted.discard(number)
        if not request.prediction:
            return ()
        if number not in self._predictions:
            self._predictions[number] = Prediction(request.prediction, self._longest, self._shortest)
        most = min(self._most_tokens, sequence.max_drafts)
        drafts = self._predictions[number].propose(sequence.token_ids[request.num_prompt_tokens :], most)
        if drafts:
            self._predicted.add(number)
        return drafts

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        if sequence.sequence_id in self._predicted:
            use = DraftUse(predicted=num_drafts, predicted_right=num_accepted)
            sequence.drafts = DraftUse.total((sequence.drafts, use))
        else:
            self._lookups[sequence.sequence_id].verified(num_accepted)

    def forget(self, sequence_id: int) -> None:
        self._lookups.pop(sequence_id, None)
        self._predictions.pop(sequence_id, None)
        self._predicted.discard(sequence_id)


class Prediction:
    """A text that an answer may repeat with changes, followed token by token.

    While the answer is what stands there, it is expected to go on so. Where it departs, it is found again behind that
    place by its last `shortest` to `longest` tokens; until `longest` of them have stood there it may be elsewhere.
    """

    def __init__(self, token_ids: ListOf[int], longest: int, shortest: int) -> None:
        self._ids, self._bytes = token_ids, np.array(token_ids, np.int32).tobytes()
        self._longest, self._shortest = longest, shortest
        self._num_seen, self._at, self._is_within = 0, 0, True
        self._sure = self._num_right = 0  # the last place that is sure, and the tokens that stood before `_at`

    def propose(self, answer: NDArray[np.int32], most_tokens: int) -> tuple[int, ...]:
        """Up to `most_tokens` drafts that follow int32 [tokens], which begin with those of every earlier call."""
        for end in range(self._num_seen + 1, len(answer) + 1):
            self._follow(answer[:end])
        self._num_seen = len(answer)
        return tuple(self._ids[self._at : self._at + most_tokens]) if self._is_within else ()

    def _follow(self, answer: NDArray[np.int32]) -> None:
        """Take in the last token of an answer."""
        if self._is_within and self._at < len(self._ids) and self._ids[self._at] == answer[-1]:
            self._at, self._num_right = self._at + 1, self._num_right + 1
            if self._num_right >= self._longest:
                self._sure = self._at
            return
        self._is_within = False
        for length in range(min(self._longest, len(answer)), self._shortest - 1, -1):
            words = answer[-length:].tobytes()
            found = self._bytes.find(words, self._sure * _BYTES)
            while found >= 0 and found % _BYTES:
                found = self._bytes.find(words, found + 1)
            if found >= 0:
                self._at, self._num_right, self._is_within = found // _BYTES + length, length, True
                return


class DraftLookup:
    """The history of one sequence, searched for its own last tokens. Arguments are those of `PromptLookup`."""

    def __init__(self, most_tokens: int, longest: int, shortest: int) -> None:
        self._most_tokens = most_tokens
        self._longest, self._shortest = longest, shortest
        self._allowed, self._least = most_tokens, shortest
        self._history = bytearray()

    def propose(self, token_ids: NDArray[np.int32], most_tokens: int) -> tuple[int, ...]:
        """Up to `most_tokens` drafts that follow int32 [tokens], which begin with those of every earlier call.

        Where the history does not reach past the place found, the drafts themselves go on: a period repeats.
        """
        known = len(self._history) // _BYTES
        self._history += token_ids[known:].tobytes()
        most_tokens = min(most_tokens, self._allowed)
        place = self._after_last_match(len(token_ids)) if most_tokens > 0 else None
        if place is None:
            return ()
        period = len(token_ids) - place
        return tuple([int(token_ids[place + index % period]) for index in range(most_tokens)])

    def verified(self, num_accepted: int) -> None:
        """Take in how many drafts were right: up to twice as many are proposed next time, and at least one.

        Behind ones that were all wrong only the longest run of last tokens that may be looked for has any.
        """
        self._least = self._shortest if num_accepted else self._longest
        self._allowed = min(self._most_tokens, max(1, 2 * num_accepted))

    def _after_last_match(self, num_tokens: int) -> int | None:
        """Index of the token after the latest earlier place of the longest run of last tokens that has one."""
        history = self._history
        for length in range(min(self._longest, num_tokens - 1), self._least - 1, -1):
            end = len(history) - _BYTES  # a match ends before the last token
            found = history.rfind(history[-length * _BYTES :], 0, end)
            while found >= 0 and found % _BYTES:
                found = history.rfind(history[-length * _BYTES :], 0, found + (length * _BYTES - 1))
            if found >= 0:
                return found // _BYTES + length
        return None


_RUN_STEPS = 16  # of one way, by which it is measured
_RUNS_OF_BEST = 64  # after which another way is measured again, which may be half as fast
_NEW_SHARE = 0.5  # of a measure in the average
_KEPT = 0.98  # of what was seen of a row, a step later: drafts that are never right cost it 2 % of a token a step
_LEVELS = 64  # of a row's share of right drafts


class DraftDepth:
    """Says how many drafts the backend is to propose for each row: as many as bring more than their time would.

    Seen are the seconds of a step by the drafts of its rows, the tokens that came of it, and of each row the share that
    was right of those drafts before which all were. A row begins with one right draft, and what was seen of it fades:
    where drafts were refused one is tried again at times. Steps of decodes alone are measured. Numbers of rows that are
    less than a half apart share their measures: with more rows a step takes longer for each draft that it verifies. 0
    is a depth as others are.

    `measures` false proposes as many as there may be. `num_rows` is of the backend.
    """

    def __init__(self, most: int, num_rows: int, *, measures: bool) -> None:
        self._depths = [*(depth for depth in (0, 1, 2, 3, 4, 6, 8, 12) if depth < most), most]
        self._measures = measures
        self._right, self._seen = np.zeros(num_rows), np.zeros(num_rows)  # drafts of each row, right ones and all
        self._groups: dict[int, _Depths] = {}
        self._last: _Depths | None = None  # of the last step, if the next one begins with drafts of the same way
        self._ended_s = 0.0

    def pays(self, num_rows: int) -> bool:
        """False where none of so many rows is to have drafts."""
        return bool(self._group(num_rows).by_share[-1])

    def is_off(self, num_rows: int) -> bool:
        """True where so many rows are to go on without drafts of any kind, which was faster or is measured now."""
        return self._group(num_rows).is_off

    def of(self, rows: Rows, num_rows: int) -> NDArray[np.int32]:
        """int32 [rows], of some rows in a step in which `num_rows` sample."""
        shares = (1 + self._right[rows]) / (1 + self._seen[rows])
        return self._group(num_rows).by_share[(_LEVELS * shares).astype(np.intp)]

    def begin(self, row: int) -> None:
        """Another sequence has the row."""
        self._right[row] = self._seen[row] = 0

    def take_in(
        self, step: StepRows, num_sampled: NDArray[np.intp], proposed: NDArray[np.bool_], now_s: float, *,
        only_decodes: bool,
    ) -> None:  # fmt: skip
        """Take in a step that ended now; it began when the one before it ended.

        Args:
            num_sampled: intp [rows], tokens that each row was given.
            proposed: bool [rows], true where the row's drafts are the backend's.
        """
        if not self._measures:
            return
        made = step.samples & (num_sampled > 0)
        rows, num_drafts, num_right = step.numbers[made], step.num_drafts[made], num_sampled[made] - 1
        self._right[rows] = _KEPT * self._right[rows] + proposed[made] * num_right
        self._seen[rows] = _KEPT * self._seen[rows] + proposed[made] * np.minimum(num_right + 1, num_drafts)
        group, last, seconds = self._group(len(rows)), self._last, now_s - self._ended_s
        is_measured = only_decodes and len(rows) > 0
        self._last, self._ended_s = group if is_measured else None, now_s
        if is_measured and group is last and group.take_in(1 + num_right.mean(), num_drafts.mean(), seconds):
            self._last = None

    def _group(self, num_rows: int) -> _Depths:
        """That of a number of rows; before its first step it begins as the nearest measured ones would have it."""
        number = int(2 * math.log2(max(num_rows, 1)))
        group = self._groups.get(number)
        if group is None or group.is_new:
            known = [each for each, group in self._groups.items() if group.is_known]
            nearest = min(known, key=lambda each: abs(each - number), default=None)
            is_off = nearest is not None and self._groups[nearest].prefers_none
            if group is None or group.is_off != is_off:
                group = self._groups[number] = _Depths(self._depths, begins_off=is_off)
        return group


class _Depths:
    """What the steps of one group of numbers of rows take and give, and the depths of rows that follow from it.

    A run of steps goes one of these ways: all rows have the same depth, or each its own, which may be 0 for all while a
    drafter of the scheduler's goes before the backend. Each way has a run at first;
    then comes the one of two that gave more tokens a second, each its own or none, and at times another. Where that one
    takes longer than before, it is taken for a slower machine or a longer context, which all have in common.

    Args:
        begins_off: the first run has no drafts, as the nearest numbers of rows go on best without.

    Attributes:
        by_share: int32 [levels + 1], the depth of a row by the share of its drafts that was right.
    """

    def __init__(self, depths: ListOf[int], *, begins_off: bool = False) -> None:
        self._depths = np.array(depths, np.int32)
        self._own = len(depths)  # the way in which each row has its own depth; the others are places of depths
        self._seen = np.zeros((len(depths) + 1, 3))  # tokens and drafts of a row, and seconds, of a step of each way
        self._unknown: list[int] = [self._own, *range(self._own - 2, -1, -1)]  # ways, the next one last
        if begins_off:
            self._unknown = [self._own, *range(1, self._own)]
        self._way, self._is_best = 0 if begins_off else self._own - 1, False
        self._num_runs = self._run_steps = 0
        self._run = np.zeros(3)
        self.by_share = self._depths_by_share()

    @property
    def is_off(self) -> bool:
        return self._way < self._own and not self._depths[self._way]

    @property
    def is_new(self) -> bool:
        """True before the first step that was measured."""
        return not self._run_steps and not self._seen.any()

    @property
    def is_known(self) -> bool:
        """True once each way has had a run."""
        return bool(self._seen[:, 2].all())

    @property
    def prefers_none(self) -> bool:
        """True if no way is faster than none at all."""
        return bool(self._rates[0] >= self._rates.max())

    def take_in(self, num_tokens: float, num_drafts: float, seconds: float) -> bool:
        """Take in a step of the present way; True where that ended its run, and other depths may follow.

        Tokens and drafts are those of a row, in the mean.
        """
        self._run += num_tokens, num_drafts, seconds
        self._run_steps += 1
        if self._run_steps < _RUN_STEPS:
            return False
        self._end_run(np.maximum(self._run / _RUN_STEPS, 1e-9))
        self._run_steps, self._run = 0, np.zeros(3)
        self._way = self._next_way()
        self.by_share = self._depths_by_share()
        return True

    def _end_run(self, run: NDArray[np.float64]) -> None:
        old = self._seen[self._way].copy()
        new = old + (_NEW_SHARE if old[2] else 1.0) * (run - old)
        if self._is_best:
            old_s, new_s, run_s = np.interp((old[1], new[1], run[1]), self._depths, self._seen[: self._own, 2])
            slower = 1 + _NEW_SHARE * (run[2] / (old[2] * run_s / old_s) - 1)
            self._seen[:, 2] *= slower
            new[2] = old[2] * new_s / old_s * slower
        self._seen[self._way] = new

    @property
    def _rates(self) -> NDArray[np.float64]:
        """Tokens of a row a second, of each way; 0 of one that is not known."""
        return self._seen[:, 0] / np.maximum(self._seen[:, 2], 1e-9)

    def _next_way(self) -> int:
        if self._unknown:
            return self._unknown.pop()
        self._num_runs += 1
        best, other = (self._own, 0) if self._rates[self._own] > self._rates[0] else (0, self._own)
        turn, is_of_depth = divmod(self._num_runs // _RUNS_OF_BEST, 2)
        self._is_best = self._num_runs % _RUNS_OF_BEST > 0
        if self._is_best:
            return best
        return other if is_of_depth else 1 + turn % (self._own - 1)

    def _depths_by_share(self) -> NDArray[np.int32]:
        """Of each share the depth whose right drafts are the most more than what their time would bring otherwise."""
        if self._way < self._own:
            return np.full(_LEVELS + 1, self._depths[self._way])
        rates, seconds = self._rates, self._seen[: self._own, 2]
        rate = max(rates[0], rates[self._own]) if rates[self._own] else rates.max()
        shares = np.arange(_LEVELS + 1)[:, None] / _LEVELS
        right = np.cumsum(shares ** np.arange(1, self._depths[-1] + 1), axis=1)
        costs = seconds - seconds[0]
        if self._own > 2:  # a step without drafts is another one: in flight, and without those of the text
            of_one = (seconds[-1] - seconds[1]) / (self._depths[-1] - self._depths[1])
            costs[1:] = np.maximum(costs[1:], of_one * self._depths[1:])
        gained = np.pad(right, ((0, 0), (1, 0)))[:, self._depths] - rate * costs
        depths: NDArray[np.int32] = self._depths[gained.argmax(axis=1)]
        return depths


class Drafting:
    """Owns the drafter. A drafter that raises is not asked again: texts are the same without drafts.

    InvalidRequestError: there is a drafter, and room for no draft.

    Args:
        drafter: goes before the backend, whose drafts are taken where it has none.
        most_drafts: of a sequence that the backend has room for. most_proposed: that it proposes itself.
        num_rows: of the backend.
        forced: up to so many next tokens of a row that its grammar forces. They go before the drafter's, and are
            verified all the same.
        measures: how many drafts the backend proposes is measured (`DraftDepth`), and not always as many as it may.
        spare: positions that the backend needs beyond those of its drafts.
    """

    def __init__(
        self, drafter: Drafter | None, most_drafts: int, vocab_size: int, num_rows: int, most_proposed: int = 0,
        forced: Callable[[int, int], tuple[int, ...]] = lambda _row, _most: (), *, measures: bool = True,
        spare: int = 0,
    ) -> None:  # fmt: skip
        if drafter is not None and most_drafts < 1:
            message = f"a drafter needs speculative_tokens of at least 1, not {most_drafts}"
            raise InvalidRequestError(message, "speculative_tokens")
        self._drafter, self._most_drafts, self._vocab_size = drafter, most_drafts, vocab_size
        self._forced, self.spare = forced, spare
        self.most_proposed = min(most_proposed, most_drafts)
        self._depth = DraftDepth(self.most_proposed, num_rows, measures=measures and self.most_proposed > 0)
        self._of_backend = np.zeros(num_rows, np.bool_)  # rows whose drafts the backend has proposed
        self._of_drafter: set[int] = set()  # ids of sequences whose drafts the drafter has proposed

    def awaits_results(self, num_rows: int) -> bool:
        """As `Drafter.awaits_results`, of a step in which so many rows sample, and True where the backend drafts.

        Where the backend's drafts are measured, the drafter's are with them, also while each row's own depth is 0: what
        waiting for steps costs is in their times.
        """
        if self.most_proposed:
            has_others = self._drafter is not None and self._drafter.awaits_results
            return not self._depth.is_off(num_rows) if has_others else self._depth.pays(num_rows)
        return self._drafter is not None and self._drafter.awaits_results

    def wanted(self, step: StepRows) -> NDArray[np.int32] | None:
        """int32 [rows], drafts that the backend is to propose after a step; None for none at all."""
        num_rows = int(step.samples.sum())
        if not self.most_proposed or not self._depth.pays(num_rows):
            return None
        return self._depth.of(step.numbers, num_rows)

    def ended(self, step: StepRows, num_sampled: NDArray[np.intp], now_s: float, *, only_decodes: bool) -> None:
        """Take in how long a step took and how many tokens its rows were given, intp [rows]."""
        if self.most_proposed:
            self._depth.take_in(step, num_sampled, self._of_backend[step.numbers], now_s, only_decodes=only_decodes)

    @property
    def is_on(self) -> bool:
        return self.most_proposed > 0 or self._drafter is not None

    def propose(self, going: ListOf[Sequence], proposed: ProposedDrafts | None, go_on: NDArray[np.bool_]) -> None:
        """Have drafts proposed for sequences that go on from a known token and have room for a draft.

        `proposed` are the backend's of the step's rows, and `go_on` says which of those the sequences are. Only where a
        grammar follows drafts does the host wait for their ids.
        """
        found: dict[int, tuple[int, ...]] = {}
        self._of_drafter.difference_update([sequence.sequence_id for sequence in going])
        if self._drafter is not None and going:
            with self._faults():
                found = {each.sequence_id: self._forced(each.own_row, each.max_drafts) for each in going}
                asked = [sequence for sequence in going if not found[sequence.sequence_id]]
                for sequence, drafts in zip(asked, self._drafter.propose(asked) if asked else (), strict=True):
                    found[sequence.sequence_id] = usable = self._usable(sequence, drafts)
                    if usable:
                        self._of_drafter.add(sequence.sequence_id)
        rows = go_on.nonzero()[0].tolist()
        for row, sequence in zip(rows, going, strict=True):
            drafts = self._usable(sequence, found.get(sequence.sequence_id, ()))
            self._of_backend[sequence.own_row] = not drafts
            if not drafts and proposed is not None:
                count = min(int(proposed.counts[row]), self._most_drafts, max(sequence.max_drafts, 0))
                drafts = tuple(range(PROPOSED, PROPOSED - count, -1))
                if count and sequence.request.sampling.structured is not None:
                    drafts = self._usable(sequence, tuple(proposed.read()[row, :count].tolist()))
            sequence.propose(drafts)

    def verified(self, sequences: Iterable[Sequence], num_drafts: ListOf[int], num_accepted: ListOf[int]) -> None:
        if self._drafter is not None:
            with self._faults():
                for sequence, drafts, accepted in zip(sequences, num_drafts, num_accepted, strict=True):
                    if sequence.sequence_id in self._of_drafter:
                        self._drafter.verified(sequence, drafts, accepted)

    def begin(self, sequence: Sequence) -> None:
        """A sequence has got a row."""
        self._depth.begin(sequence.own_row)

    def forget(self, sequence: Sequence) -> None:
        self._of_drafter.discard(sequence.sequence_id)
        if self._drafter is not None:
            with self._faults():
                self._drafter.forget(sequence.sequence_id)

    def _usable(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """Drafts that the backend has room for and the request wants, before the first one beyond the vocabulary."""
        most = min(self._most_drafts, sequence.max_drafts)
        return tuple(takewhile(lambda token_id: 0 <= token_id < self._vocab_size, drafts[:most]))

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001 - a fault of what is only to be faster
            _LOG.exception("no more drafts are proposed")
            self._drafter = None
