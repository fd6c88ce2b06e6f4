"""The record of `/v1/chat/completions`: every field of OpenAI's API, and those of vLLM's and llama.cpp's that apply."""

from __future__ import annotations

from typing import Any

import msgspec

from realizar.server.openai.records.sampling import GenerationFields


class FunctionDefinition(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool; the only type is `function`."""

    type: str
    function: FunctionDefinition | None = None
    custom: Any = None
    cache_control: dict[str, Any] | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of `response_format`."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer: `text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. The contents of `messages`, `tools` and `tool_choice` are checked later, at their use."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None

    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    metadata: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Any = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    mm_processor_kwargs: Any = None
    modalities: Any = None
    moderation: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None
