"""`StopChecker` ends an answer at end-of-generation ids, stop ids and stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from realizar.outputs import FinishReason
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.detokenizer import Detokenizer
from realizar.tokenizer.parsers.cursor import overlap
from realizar.tokenizer.tokenizer import Tokenizer


class StopChecker:
    """The growing text of one choice, up to its stop.

    A possible beginning of a stop string is held back until it is certain. The first complete stop string counts, so
    the result does not depend on how the text is cut into tokens. Neither the stop string nor a stop token is part of
    the text. The text of the first `min_tokens` tokens is not searched, and a stop token among them is text, unless the
    output has a grammar: then it ends the output, as it does in the engine. Control tokens that mark tool calls or
    reasoning are text; `marks` says where in the whole text they begin, to tell them from the same words in ordinary
    tokens.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, eos_ids: Iterable[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer.answer_bytes)
        self._stop = sampling.stop
        self._stop_ids = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_ids)
        self._min_tokens = sampling.min_tokens
        self._min_before_id = sampling.least_tokens
        self._mark_sizes = {token_id: len(text) for text, token_id in tokenizer.answer_marks.items()}
        self._num_tokens = self._num_characters = 0
        self.marks: list[int] = []
        self._held = ""
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.stop_string is None and self.stop_token_id is None else "stop"

    @property
    def may_stop(self) -> bool:
        return bool(self._stop)

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that tokens complete, including text that was held back. Nothing is added after the stop."""
        if self._stop or not (self._stop_ids.isdisjoint(token_ids) and self._mark_sizes.keys().isdisjoint(token_ids)):
            return "".join([self._add(token_id) for token_id in token_ids])
        if self.finish_reason is not None:
            return ""
        self._num_tokens += len(token_ids)
        text = self._detokenizer.add(token_ids)
        self._num_characters += len(text)
        return text

    def _add(self, token_id: int) -> str:
        if self.finish_reason is not None:
            return ""
        self._num_tokens += 1
        if self._num_tokens > self._min_before_id and token_id in self._stop_ids:
            self.stop_token_id = token_id
            return self._rest()
        text = self._detokenizer.add((token_id,))
        self._num_characters += len(text)
        if token_id in self._mark_sizes:
            self.marks.append(self._num_characters - self._mark_sizes[token_id])
        return self._search(text) if self._stop and self._num_tokens > self._min_tokens else text

    def finish(self) -> str:
        """The text that is still held back when the answer ends without a stop."""
        return "" if self.finish_reason is not None else self._rest()

    def _rest(self) -> str:
        text, self._held = self._held + self._detokenizer.finish(), ""
        return text

    def _search(self, new: str) -> str:
        text = self._held + new
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            end, size, self.stop_string = min(found)
            self._held = ""
            return text[: end + size]
        keep = overlap(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
