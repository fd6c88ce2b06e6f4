"""Outputs as callers get them: of a stream for each delta, and of a whole request. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from realizar.outputs import (
    NO_DRAFTS,
    NO_SNAPSHOTS,
    DraftUse,
    FinishReason,
    PromptProgress,
    SnapshotUse,
    TokenLogprobs,
)


@dataclass(slots=True)  # one a choice and step: frozen it would take four times as long to make
class ChoiceDelta:
    """A delta of a stream: the output that one choice gained. The texts of all deltas concatenate to the whole.

    Attributes:
        token_ids: the tokens gained; their text may come with a later delta, if it ends inside a character or could be
            the start of a stop string.
        finish_reason: set on the last delta of the choice.
        stop_reason: the stop string or the stop token id that ended it.
        num_cached_tokens: prompt tokens that the first choice found in the prefix cache, as far as it is known yet.
        prompt_progress: set where the delta tells of the prompt, and of nothing else.
        snapshots: that the choice used by now.
        marks: where in `text` tokens begin that mark tool calls or reasoning: the same words elsewhere are a quotation.
    """

    request_id: str
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    prompt_progress: PromptProgress | None = None
    snapshots: SnapshotUse = NO_SNAPSHOTS
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of a request's stages, in seconds of `time.monotonic`."""

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float

    @property
    def queue_s(self) -> float:
        return self.scheduled_s - self.arrival_s

    @property
    def prefill_s(self) -> float:
        """Seconds from the first step to the first token, or to the end of scoring."""
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float:
        return self.finished_s - self.first_token_s


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished choice.

    Attributes:
        index: among the n choices.
        text: without the stop string or the text of a stop token.
        token_ids: all generated tokens, a stop token included.
        logprobs: per token; None where not asked for. A server's streams give them with their deltas alone.
        stop_reason: the stop string or the stop token id that ended it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: Sequence[TokenLogprobs] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request.

    Attributes:
        prompt: its text, or None where token ids were given.
        prompt_logprobs: per prompt token, the first None; None where not asked for.
        outputs: the choices, by index.
        num_cached_tokens: prompt tokens that the first choice found in the prefix cache.
        snapshots: that all choices used.
        drafts: that were verified of all choices, but of those that ended at a stop string.
        pooled: float32 values [hidden_size], of a pooled request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    pooled: tuple[float, ...] | None = None
    snapshots: SnapshotUse = NO_SNAPSHOTS
    drafts: DraftUse = NO_DRAFTS

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens over the time to the first token; 0 where no time passed."""
        return len(self.prompt_token_ids) / self.timings.prefill_s if self.timings.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after each choice's first over the time after the first token; 0 where there were none."""
        later = self.num_generated_tokens - sum(bool(output.token_ids) for output in self.outputs)
        return later / self.timings.decode_s if later and self.timings.decode_s > 0 else 0.0
