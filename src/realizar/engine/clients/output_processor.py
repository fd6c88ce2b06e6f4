"""`OutputProcessor` turns tokens into text, for each request and choice: as deltas of a stream and as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from realizar.outputs import (
    ChoiceDelta,
    CompletionOutput,
    FinishReason,
    RequestOutput,
    Timings,
    TokenLogprobs,
    TokenOutput,
)
from realizar.request import Request
from realizar.sampling_params import SamplingParams


class GrowingText(Protocol):
    """The growing text of one choice; `tokenizer.stop_checker.StopChecker` implements it."""

    def add(self, token_id: int) -> str:
        """The text that a token completes. It may be empty, and may include text that was held back."""

    def finish(self) -> str:
        """The text that is still held back at the end."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""


@dataclass(slots=True)
class _Choice:
    text: GrowingText
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class _Open:
    request: Request
    prompt: str | None
    choices: list[_Choice]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    pooled: tuple[float, ...] | None = None


class OutputProcessor:
    """Owns the text of every open request.

    Args:
        new_text: makes the text of a choice from the request's sampling parameters.
    """

    def __init__(self, new_text: Callable[[SamplingParams], GrowingText]) -> None:
        self._new_text = new_text
        self._open: dict[str, _Open] = {}

    def add(self, request: Request, prompt: str | None = None) -> None:
        """Start a request; `prompt` is its text if it came as text."""
        choices = [_Choice(self._new_text(request.sampling)) for _ in range(request.sampling.n)]
        self._open[request.request_id] = _Open(request, prompt, choices)

    def discard(self, request_id: str) -> None:
        """Forget a request; its later outputs are ignored."""
        self._open.pop(request_id, None)

    def process(self, output: TokenOutput) -> ChoiceDelta | None:
        """Take in a step's tokens of one choice.

        A delta whose `stop_reason` is a string ended here, so the caller must abort that choice in the engine. The
        result is None for a choice that has ended, or a request that is not open.
        """
        entry = self._open.get(output.request_id)
        if entry is None or entry.choices[output.choice].finish_reason is not None:
            return None
        choice = entry.choices[output.choice]
        entry.prompt_logprobs.extend(output.prompt_logprobs)
        if entry.scheduled_s is None:
            entry.scheduled_s = output.scheduled_s
        if output.choice == 0:
            entry.num_cached_tokens = output.num_cached_tokens
        if output.pooled is not None:
            entry.pooled = output.pooled
        if entry.first_token_s is None and (output.token_ids or output.finish_reason is not None):
            entry.first_token_s = output.produced_s
        return self._take_in(choice, output, entry.num_cached_tokens)

    def finished(self, request_id: str, now_s: float) -> RequestOutput | None:
        """The whole output of a request whose choices have all ended, which is then forgotten; otherwise None."""
        entry = self._open.get(request_id)
        if entry is None or any(choice.finish_reason is None for choice in entry.choices):
            return None
        del self._open[request_id]
        request = entry.request
        sampling = request.sampling
        return RequestOutput(
            request_id=request_id,
            prompt=entry.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(
                CompletionOutput(
                    index=index,
                    text="".join(choice.texts),
                    token_ids=tuple(choice.token_ids),
                    finish_reason=choice.finish_reason or "stop",
                    logprobs=None if sampling.logprobs is None else tuple(choice.logprobs),
                    stop_reason=choice.stop_reason,
                )
                for index, choice in enumerate(entry.choices)
            ),
            timings=Timings(
                arrival_s=request.arrival_s,
                scheduled_s=now_s if entry.scheduled_s is None else entry.scheduled_s,
                first_token_s=now_s if entry.first_token_s is None else entry.first_token_s,
                finished_s=now_s,
            ),
            prompt_logprobs=None if sampling.prompt_logprobs is None else (None, *entry.prompt_logprobs),
            num_cached_tokens=entry.num_cached_tokens,
            pooled=entry.pooled,
        )

    def _take_in(self, choice: _Choice, output: TokenOutput, num_cached_tokens: int) -> ChoiceDelta:
        texts: list[str] = []
        taken = len(output.token_ids)
        finish_reason, stop_reason = output.finish_reason, output.stop_token_id
        stop_string: str | None = None
        text_ids = output.token_ids if output.stop_token_id is None else output.token_ids[:-1]
        for count, token_id in enumerate(text_ids, start=1):
            texts.append(choice.text.add(token_id))
            stop_string = choice.text.stop_string
            if stop_string is not None:
                taken, finish_reason = count, "stop"
                break
        if finish_reason is not None and stop_string is None:
            texts.append(choice.text.finish())
        delta = ChoiceDelta(
            request_id=output.request_id,
            choice=output.choice,
            text="".join(texts),
            token_ids=output.token_ids[:taken],
            logprobs=output.logprobs[:taken],
            finish_reason=finish_reason,
            stop_reason=stop_reason if stop_string is None else stop_string,
            num_cached_tokens=num_cached_tokens,
        )
        choice.texts.append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return delta
