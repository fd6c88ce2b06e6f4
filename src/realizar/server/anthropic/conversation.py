"""`read_conversation` reads a request of Anthropic's Messages API as a `Conversation`."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from realizar.sampling_params import StructuredOutput
from realizar.server.anthropic.blocks import read_messages, read_system
from realizar.server.anthropic.records import CountTokensRequest, MessagesRequest
from realizar.server.anthropic.tools import read_tools
from realizar.server.errors import ApiError, refused, unsupported
from realizar.server.generation.conversation import Conversation, can_continue
from realizar.server.generation.sampling import SamplingWishes
from realizar.server.http.unknown_fields import known_only

_LOG = logging.getLogger(__name__)
_BILLING = "x-anthropic-billing-header:"
_PLAIN = ("max_tokens", "temperature", "top_k", "top_p")
_NAMES = {"stop": "stop_sequences", "structured": "output_config.format"}
_KEPT_EDIT = "clear_thinking_20251015"  # templates drop earlier reasoning by themselves


def read_conversation(request: CountTokensRequest) -> Conversation:
    """Check a request and read it. A count of tokens is read like a request for the shortest answer.

    Raises:
        ApiError, InvalidRequestError: the request is refused; names the field.
    """
    _check_without_effect(request)
    tools = read_tools(request.tools, request.tool_choice)
    structured = _structured(request)
    messages = read_messages(request.messages)
    if system := _system(request):
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(
        messages=messages,
        tools=tools,
        wishes=_wishes(request, structured),
        variables=_variables(request),
        continues=can_continue(messages[-1]),
        bounded_by_context=True,
        names=_NAMES,
    )


def shows_reasoning(request: CountTokensRequest) -> bool:
    """True if reasoning is part of the answer: the client has not turned it off, and wants to see it."""
    thinking = request.thinking
    return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")


def marks_cache(request: CountTokensRequest) -> bool:
    """True if `cache_control` stands in a request, anywhere that it may."""
    if request.cache_control is not None or _marked(request.system) or _marked(request.tools):
        return True
    return any(_marked(message.get("content")) for message in request.messages)


def _marked(blocks: Any) -> bool:
    """True if a block of a list has `cache_control`, or one within a tool's result."""
    if not isinstance(blocks, list):
        return False
    return any(each.get("cache_control") is not None or _marked(each.get("content")) for each in blocks)


def _system(request: CountTokensRequest) -> str:
    """The system prompt without the header that Claude Code changes at each request: it would spoil the cache."""
    texts = read_system(request.system)
    kept = [_without_header(text) for text in texts]
    if kept != texts:
        _log_once()
    return "\n\n".join(text for text, given in zip(kept, texts, strict=True) if text or not given)


def _without_header(text: str) -> str:
    """A text without its first line where that is the header: proxies join the blocks of a prompt to one text."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING) else text


@functools.cache
def _log_once() -> None:
    """Say that system prompts are changed. A client that sends the block sends it with each request."""
    _LOG.info("lines of system prompts that begin with %s are left out of prompts", _BILLING[:-1])


def _wishes(request: CountTokensRequest, structured: StructuredOutput | None) -> SamplingWishes:
    if not isinstance(request, MessagesRequest):
        return SamplingWishes(plain={"max_tokens": 1}, structured=structured)
    return SamplingWishes(
        plain={name: value for name in _PLAIN if (value := getattr(request, name)) is not None},
        stop=request.stop_sequences,
        structured=structured,
    )


def _structured(request: CountTokensRequest) -> StructuredOutput | None:
    config = request.output_config
    if config is None or config.format is None:
        return None
    return StructuredOutput("json_schema", json.dumps(config.format.schema))


def _variables(request: CountTokensRequest) -> dict[str, Any]:
    """Variables for the template. A template that does not know them shows nothing of them."""
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return variables


def _check_without_effect(request: CountTokensRequest) -> None:
    """Refuse fields whose effect the server does not have."""
    _check_thread(request.thread)
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled" and (thinking.budget_tokens or 0) < 1:
        raise refused("thinking.budget_tokens must be at least 1", "thinking.budget_tokens")
    if request.speed == "fast":
        raise unsupported("speed", "must be standard: the server has one speed")
    if request.mcp_servers:
        raise unsupported("mcp_servers", "is not supported: the server runs no tools of its own")
    for name in ("container", "diagnostics", "compaction"):
        if getattr(request, name, None):
            raise unsupported(name, "is not supported")
    management = request.context_management or {}
    known_only("context_management", management, ("edits",))
    edits = management.get("edits")
    if not isinstance(edits, list | None):
        raise refused("context_management.edits must be a list", "context_management.edits")
    for place, edit in enumerate(edits or ()):
        if not isinstance(edit, dict) or edit.get("type") != _KEPT_EDIT:
            path = f"context_management.edits.{place}.type"
            raise unsupported(path, f"must be {_KEPT_EDIT}: the server edits no conversation")


def _check_thread(thread: object) -> None:
    """Refuse a thread in the form by which Anthropic's client goes on without: it sends the whole conversation then.

    Its runner of tools begins one with each conversation, unasked.
    """
    if thread is not None:
        message = "thread is not supported: the server holds no conversation; send all of it in messages"
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, message, param="thread", code="unsupported_parameter", details=details)
