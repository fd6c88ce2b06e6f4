"""Where an answer stops: end-of-generation ids, stop ids, stop strings, whatever tokens they are cut into."""

from __future__ import annotations

from collections.abc import Iterable

from realizar.outputs import FinishReason
from realizar.sampling_params import SamplingParams
from realizar.tokenizer.detokenizer import Detokenizer
from realizar.tokenizer.tokenizer import Tokenizer


class StopChecker:
    """The text of one choice while it grows, up to where it stops.

    Text that may be the start of a stop string is held back until it is or is not. The first stop string to be
    complete counts, so the result does not depend on how the text is cut into tokens; neither it nor a stop token is
    part of the text. Before `min_tokens` tokens nothing stops, and their text is not searched later. Control tokens
    that mark tool calls or reasoning are text.

    Args:
        tokenizer: of the model.
        sampling: `stop`, `stop_token_ids`, `ignore_eos` and `min_tokens` count.
        eos_ids: the model's end-of-generation ids.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, eos_ids: Iterable[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, shown=tokenizer.mark_ids.values())
        self._stop = sampling.stop
        self._stop_ids = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_ids)
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._held = ""
        self.stop_string: str | None = None
        self.stop_token_id: int | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """`stop` once something stopped the text."""
        return None if self.stop_string is None and self.stop_token_id is None else "stop"

    def add(self, token_id: int) -> str:
        """The text to give out after a token; may be text held back before. Empty once stopped."""
        if self.finish_reason is not None:
            return ""
        self._num_tokens += 1
        searched = self._num_tokens > self._min_tokens
        if searched and token_id in self._stop_ids:
            self.stop_token_id = token_id
            return self._rest()
        text = self._detokenizer.add(token_id)
        return self._search(text) if searched and self._stop else text

    def finish(self) -> str:
        """What is still held back, where the answer ends without a stop."""
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
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
