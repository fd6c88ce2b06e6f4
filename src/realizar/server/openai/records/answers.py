"""Records of answers: OpenAI's objects, with the order of fields and the nulls that its clients expect.

Log-probabilities are JSON already (`server.openai.logprobs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from realizar.server.generation.answer import FinishReason
from realizar.server.generation.prompt_read import PromptRead
from realizar.server.generation.state_snapshots import StateSnapshots


class PromptTokensDetails(msgspec.Struct):
    """`cached_tokens`: prompt tokens that were found in the cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    state_snapshots: StateSnapshots | UnsetType = UNSET


def make_usage(
    num_prompt: int,
    num_completion: int,
    num_cached: int | None = None,
    snapshots: StateSnapshots | UnsetType = UNSET,
) -> Usage:
    """Make the usage from counts; `num_cached` is None while it is not known."""
    details = UNSET if num_cached is None else PromptTokensDetails(num_cached)
    return Usage(num_prompt, num_completion, num_prompt + num_completion, details, snapshots)


class FunctionCall(msgspec.Struct):
    """A called function; in a stream, a delta of one."""

    name: str | UnsetType
    arguments: str


class ToolCall(msgspec.Struct):
    """A whole call."""

    id: str
    function: FunctionCall
    type: str = "function"


class ChatToolCallDelta(msgspec.Struct):
    """A delta of a call; only a call's first delta has `id` and `type`."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The answer of one choice."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The message fields that one choice gained."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    """One finished choice."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason
    logprobs: msgspec.Raw | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """A delta of one choice."""

    index: int
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    logprobs: msgspec.Raw | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class Answer(msgspec.Struct, kw_only=True):
    """An answer or a chunk. A chunk's `usage` is null except in the last chunk, if it was asked for."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: Any | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_progress: PromptRead | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One choice, or a delta of it."""

    index: int
    text: str
    logprobs: msgspec.Raw | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    prompt_logprobs: Any | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class EmbeddingData(msgspec.Struct):
    """One vector: numbers, or base64 of little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"
