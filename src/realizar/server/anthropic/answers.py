"""Whole answers of Anthropic's Messages API, and the counts of tokens in its form."""

from __future__ import annotations

from typing import Any

from realizar.server.anthropic.records import Usage
from realizar.server.api import Api
from realizar.server.generation.answer import FinishReason, arguments_object
from realizar.server.generation.chat_plan import ChatPlan
from realizar.server.generation.chat_run import ChatRun
from realizar.server.generation.usage import prompt_counts
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta


def usage_of(api: Api, plan: ChatPlan, run: ChatRun, *, marks_cache: bool) -> Usage:
    """The counts so far.

    Args:
        marks_cache: True if the request has `cache_control`. The cache is filled without it too, but only who asks for
            it looks for its tokens elsewhere than in `input_tokens`.
    """
    prompt = prompt_counts(api, plan, run)
    num_created = prompt.num_created if marks_cache else 0
    return Usage(
        input_tokens=len(plan.token_ids) - prompt.num_cached - num_created,
        cache_creation_input_tokens=num_created,
        cache_read_input_tokens=prompt.num_cached,
        output_tokens=run.num_completion_tokens,
        state_snapshots=run.state_snapshots,
    )


def stop_of(plan: ChatPlan, reason: FinishReason, stopped_by: str | int | None) -> tuple[str, str | None]:
    """`stop_reason` and `stop_sequence` of an answer that ended."""
    if reason == "tool_calls":
        return "tool_use", None
    if reason == "length":
        return ("model_context_window_exceeded" if plan.cut_by_context else "max_tokens"), None
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


class BlockList:
    """The content blocks of a whole answer, in the order in which a stream would begin them."""

    def __init__(self, *, with_reasoning: bool) -> None:
        self._with_reasoning = with_reasoning
        self._kinds: list[str] = []
        self._texts: list[list[str]] = []
        self._calls: dict[int, ToolCallDelta] = {}

    def take_in(self, part: ParsedDelta) -> None:
        """Append what the answer gained."""
        match part:
            case ContentDelta(text):
                self._grow("text", text)
            case ReasoningDelta(text):
                if self._with_reasoning:
                    self._grow("thinking", text)
            case ToolCallDelta():
                self._calls.setdefault(part.index, part)
                self._grow(f"call {part.index}", part.arguments)

    def blocks(self) -> list[dict[str, Any]]:
        """The blocks."""
        return [self._block(kind, "".join(texts)) for kind, texts in zip(self._kinds, self._texts, strict=True)]

    def _grow(self, kind: str, text: str) -> None:
        if not self._kinds or self._kinds[-1] != kind:
            self._kinds.append(kind)
            self._texts.append([])
        self._texts[-1].append(text)

    def _block(self, kind: str, text: str) -> dict[str, Any]:
        if kind == "text":
            return {"type": "text", "text": text}
        if kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": ""}
        call = self._calls[int(kind.removeprefix("call "))]
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_object(text)}
