"""Records of Anthropic's Messages API. The contents of messages and tools are checked at their use."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Metadata(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Facts about a request; `user_id` has no effect here."""

    user_id: str | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the model's reasoning. The budget is no bound here: a model ends its reasoning by itself."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer, and the effort to spend on it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The calls that are wanted."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/messages/count_tokens`. Fields typed Any are checked in `conversation.py`."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    mcp_servers: Any = None
    thread: Any = None
    compaction: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/messages`."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    container: Any = None
    diagnostics: Any = None
