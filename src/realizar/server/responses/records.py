"""Records of OpenAI's Responses API. The contents of items and tools are checked at their use."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The effort to spend on reasoning, and the form in which it is shown."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None
    mode: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer: `text`, `json_object`, or `json_schema` with the other fields."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer's format and length."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Obfuscation is padding, which is refused."""

    include_obfuscation: bool | None = None


class InputTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/responses/input_tokens`. Fields typed Any are checked in `conversation.py`.

    `model` may be omitted, as a server has one model.
    """

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None


class ResponsesRequest(InputTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/responses`. Codex adds `client_metadata`, which has no effect; `return_progress` is ours."""

    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    return_progress: bool | None = None

    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    service_tier: Any = None

    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt: Any = None
