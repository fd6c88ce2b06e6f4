"""The records of `/tokenize` and `/detokenize`, with vLLM's field names, which lm-eval uses."""

from __future__ import annotations

from typing import Any

import msgspec

from realizar.server.openai.records.chat import Tool


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Either a text, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None
