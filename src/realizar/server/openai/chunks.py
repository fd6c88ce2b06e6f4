"""`ChunkEncoder`: what the chunks and whole answers of chats and completions share."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from msgspec import UNSET, UnsetType

from realizar.engine.frontend.outputs import RequestOutput
from realizar.outputs import NO_DRAFTS, PromptProgress
from realizar.server.api import now_s
from realizar.server.generation.embedding import Embedded
from realizar.server.generation.prompt_read import PromptRead
from realizar.server.generation.run import Encoder, Run
from realizar.server.http.sse import EventTemplate, encode_event
from realizar.server.openai.records import Answer, GenerationFields, StreamOptions

D = TypeVar("D")


def usage_of(counted: Run[Any] | Embedded[Any]) -> dict[str, Any]:
    """Tokens of a request, over all its prompts and choices; those found in the cache once they are known."""
    cached = counted.num_cached_tokens
    drafts = counted.output.drafts if isinstance(counted, Run) and counted.output is not None else NO_DRAFTS
    predicted = {
        "accepted_prediction_tokens": drafts.predicted_right,
        "rejected_prediction_tokens": drafts.predicted - drafts.predicted_right,
    }
    return {
        "prompt_tokens": counted.num_prompt_tokens,
        "completion_tokens": counted.num_completion_tokens,
        "total_tokens": counted.num_prompt_tokens + counted.num_completion_tokens,
        **({} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}),
        **({"completion_tokens_details": predicted} if drafts.predicted else {}),
        **counted.snapshots,
    }


def _timings(output: RequestOutput | None) -> dict[str, float] | UnsetType:
    """llama.cpp's figures of a request with drafts; unset where none were verified."""
    if output is None or not output.drafts.drafted:
        return UNSET
    read, made = len(output.prompt_token_ids) - output.num_cached_tokens, output.num_generated_tokens
    prompt_s, made_s = output.timings.prefill_s, output.timings.decode_s
    return {
        "cache_n": output.num_cached_tokens,
        **_stage("prompt", read, prompt_s),
        **_stage("predicted", made, made_s),
        "draft_n": output.drafts.drafted,
        "draft_n_accepted": output.drafts.accepted,
    }


def _stage(name: str, count: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / max(count, 1),
        f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
    }


class ChunkEncoder(Encoder[D]):
    """Writes the answer of a run to a request; `kind` is the `object` of its chunks."""

    def __init__(self, record: GenerationFields, run: Run[D], kind: str) -> None:
        options = record.stream_options or StreamOptions()
        self._last_usage = bool(options.include_usage)
        self._every_usage = self._last_usage and bool(options.continuous_usage_stats)
        self._with_ids = bool(record.return_token_ids)
        self._names = run.api.names(as_ids=record.return_tokens_as_token_ids)
        self._counted, self._kind = run, kind
        self._created, self._started_s = now_s(), time.monotonic()
        self._templates: dict[int, EventTemplate] = {}

    def last(self) -> bytes:
        return encode_event(self._answer([], usage_of(self._counted))) if self._last_usage else b""

    def _answer(self, choices: list[Any], usage: dict[str, Any] | UnsetType | None) -> Answer:
        return Answer(
            id=self._counted.id,
            object=self._kind,
            created=self._created,
            model=self._counted.api.model.name,
            system_fingerprint=self._counted.api.fingerprint,
            choices=choices,
            usage=usage,
            timings=_timings(self._counted.output) if isinstance(usage, dict) else UNSET,
        )

    def _chunk(self, *choices: Any) -> Answer:
        """A chunk of a stream that goes on, with the usage by now or null where the request wants one."""
        if self._every_usage:
            return self._answer(list(choices), usage_of(self._counted))
        return self._answer(list(choices), None if self._last_usage else UNSET)

    def _progress(self, choice: Any, read: PromptProgress) -> bytes:
        """The event of a delta that tells of the prompt, with a choice that gained nothing."""
        chunk = self._chunk(choice)
        chunk.prompt_progress = PromptRead.of(read, self._started_s)
        return encode_event(chunk)

    def _template(self, empty: Any, field: str, *, has_logprobs: bool) -> EventTemplate:
        """Make and keep the template of a choice's events that add a text alone; `empty` has no text in `field`."""
        made = EventTemplate(self._chunk(empty), field, "logprobs" if has_logprobs else None)
        self._templates[empty.index] = made
        return made
