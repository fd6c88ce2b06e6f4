"""`Plan`: a step that is being composed; `Aside`, the prompt that is read beside steps; and `StepLimit`, a step's size
while the device is short of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

import numpy as np

from realizar.batch import AsideWork, OpenedRow, StepRows
from realizar.scheduler.row_table import Column, Rows, Sequence

_LEAST_ASIDE = 512  # tokens of a chunk that is read aside: it takes as long as one of several times as many
_LEFT_ASIDE = 64  # tokens of a prompt that are never read aside: after the last one a token is sampled
_MOST_ASIDE = 2  # chunks: one runs, and the next is there when it ends
_LEAST_TOKENS = 16  # a step of one sequence is not cut below this: its request fails
_STEPS_TO_GROW = 64  # steps in a row that must have fitted before larger ones are tried


class Plan:
    """The rows of a step with their tokens, and the remaining budget of tokens.

    Attributes:
        decodes: intp [decodes], rows that compute their last token; they come before all others.
        num_drafts: int32 [decodes], drafts that follow it; None where no row has any.
        prompts: tokens of each sequence that reads its prompt.
        restored: keys of the snapshots that sequences start from.
        takes_turns: rows that decode do, so that some of them have none in this step.
    """

    def __init__(self, budget: int, max_rows: int) -> None:
        self.budget, self._max_rows = budget, max_rows
        self._most_prompt_tokens: Callable[[int], int | None] = lambda _position: None
        self._left: dict[str, int] | None = None  # tokens of each client's prompts, while they are shared out
        self.decodes: Rows = np.zeros(0, np.intp)
        self.num_drafts: Column | None = None
        self.prompts: dict[Sequence, int] = {}
        self.restored: dict[Sequence, bytes] = {}
        self.opened: list[OpenedRow] = []
        self.takes_turns = False

    @property
    def num_tokens(self) -> int:
        drafts = 0 if self.num_drafts is None else int(self.num_drafts.sum())
        return len(self.decodes) + drafts + sum(self.prompts.values())

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.prompts)

    @property
    def num_free(self) -> int:
        """Rows of one token that there is room for yet."""
        return max(min(self.budget, self._max_rows - self.num_rows), 0)

    def add_decodes(self, rows: Rows, num_drafts: Column | None) -> None:
        """Schedule the last token of each row, and drafts, before any other."""
        self.decodes, self.num_drafts = rows, num_drafts
        self.budget -= self.num_tokens

    def share(self, weights: Mapping[str, int] | None) -> None:
        """Share the budget out among the prompts of clients, by weight; None lets any prompt have what remains."""
        total = sum(weights.values()) if weights else 1
        shares = {name: -(-self.budget * weight // total) for name, weight in (weights or {}).items()}
        self._left = shares or None

    def room_for(self, sequence: Sequence) -> int:
        """Tokens that a prompt may have beside those that it has."""
        left = self.budget if self._left is None else self._left.get(sequence.request.client.name, 0)
        return max(min(self.budget, left), 0)

    def start_prompts(self, most_tokens: Callable[[int], int | None], position: int) -> None:
        """Bound the tokens of prompts, now that all decodes are in, by `most_tokens` of the farthest one's position."""
        self._most_prompt_tokens = most_tokens
        self.limit(position, least=0)

    def limit(self, position: int, *, least: int = 1) -> None:
        """Limit the budget for a prompt that goes on after so many tokens: later ones are slower."""
        if (most := self._most_prompt_tokens(position)) is not None:
            self.budget = min(self.budget, max(most - sum(self.prompts.values()), least))

    def add(self, sequence: Sequence, count: int) -> None:
        """Schedule `count` tokens of a prompt in all."""
        more = count - self.prompts.get(sequence, 0)
        self.budget -= more
        if self._left is not None:
            self._left[sequence.request.client.name] -= more
        self.prompts[sequence] = count

    def remove(self, sequence: Sequence) -> None:
        before = self.num_tokens
        stay = self.decodes != sequence.row
        self.decodes = self.decodes[stay]
        self.num_drafts = None if self.num_drafts is None else self.num_drafts[stay]
        self.prompts.pop(sequence, None)
        self.restored.pop(sequence, None)
        self.budget += before - self.num_tokens


class Aside:
    """The prompt that is read aside, if any: its chunks run beside the steps of other rows, on a part of the device.

    A chunk's tokens count as computed once it is scheduled, so the prompt is in no step before its chunks have ended.
    Where it leaves earlier, as it ends, is preempted, or no row decodes any more, the next steps wait for them.

    Attributes:
        sequence: whose prompt it is. num_running: chunks that had not ended when this step was begun to be scheduled.
    """

    def __init__(self, tokens: int) -> None:
        """Take chunks of so many tokens at most; with 0 nothing is read aside."""
        self._tokens = tokens
        self.sequence: Sequence | None = None
        self.num_running = 0
        self._refused: int | None = None  # a sequence that there are no blocks for

    def choose(self, prompts: ListOf[Sequence]) -> None:
        """Take the only prompt that is read, if it is long, and nothing is wanted of its tokens before the last."""
        if not self._tokens or self.sequence is not None or self.num_running or len(prompts) != 1:
            return
        (one,) = prompts
        request = one.request
        is_plain = one.running and not (
            request.embeddings or request.pooling or request.sampling.prompt_logprobs is not None
        )
        if is_plain and one.sequence_id != self._refused and self._rest(one) >= self._tokens:
            self.sequence = one

    def wanted(self, *, others: bool) -> int:
        """Tokens of the chunk that may begin, or 0. The prompt leaves where it has none left, or is read with `others`,
        once its chunks have ended.
        """
        if self.sequence is None or self.num_running >= _MOST_ASIDE:
            return 0
        tokens = min(self._tokens, self._rest(self.sequence))
        if tokens >= _LEAST_ASIDE and not others:
            return tokens
        if not self.num_running:
            self.sequence = None
        return 0

    def begin(self, count: int) -> bool:
        """Begin a chunk, for which there are so many blocks' tokens; False where they are too few."""
        if count >= _LEAST_ASIDE:
            self.num_running += 1
            return True
        if not self.num_running and self.sequence is not None:
            self._refused, self.sequence = self.sequence.sequence_id, None
        return False

    def leave(self, sequence: Sequence | None = None) -> None:
        """Read nothing aside any more, or not this prompt."""
        if sequence is None or sequence is self.sequence:
            self.sequence = None

    def work(self, chunk: StepRows | None) -> AsideWork | None:
        """What a step has to do with the chunks, one of which begins with it where `chunk` is given."""
        return AsideWork(chunk, self.sequence is None) if self.num_running else None

    def _rest(self, sequence: Sequence) -> int:
        return sequence.num_chunk_tokens - _LEFT_ASIDE


class StepLimit:
    """Halved when a step did not fit into memory, and doubled again after many that did.

    While `is_short`, each step is awaited before the next, to know which one fails.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._most = max_rows, max_tokens
        self.rows, self.tokens = self._most
        self._num_fitting = 0
        self.is_short = False

    def failed(self, num_steps: int, num_rows: int, num_tokens: int) -> bool:
        """Halve those of the largest step, after one in flight did not fit; False if it is alone, and the smallest."""
        self._num_fitting = 0
        if num_steps == 1 and num_rows <= 1 and num_tokens <= _LEAST_TOKENS:
            return False
        self.is_short = True
        self.rows = max(num_rows // 2, 1)
        self.tokens = max(num_tokens // 2, self.rows, min(_LEAST_TOKENS, self._most[1]))
        return True

    def fitted(self) -> None:
        if not self.is_short:
            return
        self._num_fitting += 1
        if self._num_fitting == _STEPS_TO_GROW:
            self._num_fitting = 0
            self.is_short = (self.rows, self.tokens) != self._most
            self.rows, self.tokens = min(2 * self.rows, self._most[0]), min(2 * self.tokens, self._most[1])
