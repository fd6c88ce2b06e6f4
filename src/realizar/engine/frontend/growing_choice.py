"""`GrowingChoice`: the tokens and the text of one choice while they grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from realizar.engine.frontend.async_stream import TakeDelta
from realizar.engine.frontend.outputs import ChoiceDelta, CompletionOutput
from realizar.logprob_columns import LogprobColumns, StepEntry
from realizar.outputs import NO_DRAFTS, NO_SNAPSHOTS, DraftUse, FinishReason, SnapshotUse


class GrowingText(Protocol):
    """The growing text of one choice; `tokenizer.stop_checker.StopChecker` implements it."""

    @property
    def may_stop(self) -> bool:
        """True if the text may end at a stop string. Tokens are then added as they come, one at a time."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that tokens complete. It may be empty, and may include text that was held back."""

    def finish(self) -> str:
        """The text that is still held back at the end."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""

    @property
    def marks(self) -> Sequence[int]:
        """Where in the whole text tokens begin that mark tool calls or reasoning."""


class GrowingLogprobs:
    """Log-probabilities of a choice or of a prompt while they come.

    Unless it `keeps` them, the last token's stay in the columns of its step until the next one come, for who keeps up.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._first = 0  # the first token that is still here
        self._entries: list[StepEntry | LogprobColumns] = []  # of one token each

    def take(self, source: LogprobColumns, index: int) -> None:
        """Those of the next token, which have an index in the columns of their step."""
        self.settle()
        self._entries.append(StepEntry(source, index))
        if self._keeps:
            self.settle()

    def settle(self) -> None:
        """Let go of the last step's columns."""
        if self._entries and isinstance(last := self._entries[-1], StepEntry):
            self._entries[-1] = last.alone()

    def between(self, start: int, stop: int) -> LogprobColumns:
        """The tokens from `start` up to `stop`, as far as they came and are kept."""
        first, last = max(start - self._first, 0), max(stop - self._first, 0)
        return LogprobColumns.joined([LogprobColumns.of(entry) for entry in self._entries[first:last]])

    def give(self, start: int, stop: int) -> StepEntry | LogprobColumns:
        """The same, which are not wanted again unless they are kept."""
        if self._keeps:
            return self.between(start, stop)
        count = min(max(stop - self._first, 0), len(self._entries))
        given = self._entries[:count]
        del self._entries[:count]
        self._first += count
        return given[0] if count == 1 else LogprobColumns.joined([LogprobColumns.of(entry) for entry in given])

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(slots=True, eq=False)
class GrowingChoice:
    """One choice of an open request.

    A text that may stop the choice is made with every token. Any other text is made when it is asked for, so that the
    tokens which came meanwhile are converted together.

    Attributes:
        on_text_error: called with an exception that `text` raised. It must end the request.
        on_news: called by `note`; None if deltas are not wanted.
        keeps_logprobs: True if the whole choice has the log-probabilities that deltas had.
        num_cached_tokens: prompt tokens that the request's first choice found in the prefix cache, as far as known.
        is_noted: nobody has to be called: the consumer knows that there is a delta to take, or wants none.
        finish_reason, stop_reason: None while it grows.
    """

    request_id: str
    index: int
    text: GrowingText
    on_text_error: Callable[[Exception], None]
    on_news: Callable[[TakeDelta], None] | None
    keeps_logprobs: bool = True
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    snapshots: SnapshotUse = NO_SNAPSHOTS
    drafts: DraftUse = NO_DRAFTS
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    may_stop: bool = field(init=False)
    is_noted: bool = field(init=False)
    _texts: list[str] = field(default_factory=list)
    _logprobs: GrowingLogprobs | None = None
    _failed: bool = False
    _num_spelled: int = 0  # tokens whose text has been made
    _given_tokens: int = 0  # by `take_delta`, as those below
    _given_texts: int = 0
    _given_characters: int = 0
    _given_marks: int = 0

    def __post_init__(self) -> None:
        self.may_stop = self.text.may_stop
        self.is_noted = self.on_news is None

    def note(self) -> None:
        """Report to the consumer that there is a delta to take, unless it knows."""
        if not self.is_noted and self.on_news is not None:
            self.is_noted = True
            self.on_news(self.take_delta)

    def take_logprobs(self, source: LogprobColumns, place: int) -> None:
        """Take in the log-probabilities of the choice's next token, which may come before the token does."""
        if self._logprobs is None:
            self._logprobs = GrowingLogprobs(keeps=self.keeps_logprobs)
        self._logprobs.take(source, place)

    def stops_at(self, token_id: int) -> bool:
        """Take in a token of a choice that may stop; True if its text completes a stop string."""
        self.token_ids.append(token_id)
        if not self._spell(len(self.token_ids)) or self.text.stop_string is None:
            return False
        self.finish("stop", self.text.stop_string)
        return True

    def end(self, finish_reason: FinishReason, stop_token_id: int | None) -> bool:
        """End the choice as the engine did, and make the rest of its text; False if that failed."""
        if not self._spell(len(self.token_ids) - (stop_token_id is not None), is_whole=True):
            return False
        self.finish(finish_reason, stop_token_id)
        return True

    def finish(self, finish_reason: FinishReason, stop_reason: str | int | None) -> None:
        """Note how the choice has ended."""
        self.finish_reason, self.stop_reason = finish_reason, stop_reason
        if self._logprobs is not None:
            self._logprobs.settle()  # a slow consumer would keep the last step's columns

    def take_delta(self) -> ChoiceDelta | None:
        """All that the choice gained since the last call; None if its text could not be made."""
        self.is_noted = False
        if self._failed or (self.finish_reason is None and not self._spell(len(self.token_ids))):
            return None
        token_ids, texts = self.token_ids[self._given_tokens :], self._texts[self._given_texts :]
        grown = self._logprobs
        logprobs = () if grown is None else grown.give(self._given_tokens, len(self.token_ids))
        self._given_tokens, self._given_texts = len(self.token_ids), len(self._texts)
        text = texts[0] if len(texts) == 1 else "".join(texts)
        return ChoiceDelta(
            self.request_id,
            self.index,
            text,
            tuple(token_ids),
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.num_cached_tokens,
            snapshots=self.snapshots,
            marks=self._marks_of(text),
        )

    def _marks_of(self, text: str) -> tuple[int, ...]:
        start, marks = self._given_characters, self.text.marks
        self._given_characters += len(text)
        found = list[int]()
        while self._given_marks < len(marks) and marks[self._given_marks] < self._given_characters:
            found.append(marks[self._given_marks] - start)
            self._given_marks += 1
        return tuple(found)

    def completion(self, *, with_logprobs: bool) -> CompletionOutput:
        """The whole choice, which has ended; with its log-probabilities only if they are kept."""
        grown = self._logprobs or GrowingLogprobs()
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "stop",
            logprobs=grown.between(0, len(self.token_ids)) if with_logprobs and self.keeps_logprobs else None,
            stop_reason=self.stop_reason,
        )

    def _spell(self, end: int, *, is_whole: bool = False) -> bool:
        """Make the text of the tokens before `end`, and of what is held back if it `is_whole`; False if that failed."""
        try:
            if self._num_spelled < end:
                new_ids = self.token_ids[self._num_spelled : end]
                self._num_spelled = end
                self._texts.append(self.text.add(new_ids))
            if is_whole:
                self._texts.append(self.text.finish())
        except Exception as error:  # noqa: BLE001 - one request's text must not cost the others theirs
            self._failed = self.is_noted = True  # its consumer gets an error in place of a delta
            self.on_text_error(error)
            return False
        return True
