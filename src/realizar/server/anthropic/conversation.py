"""`read_conversation` reads a request of Anthropic's Messages API as a `Conversation`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from realizar.images.given import MEDIA_TYPES, GivenImage
from realizar.sampling_params import StructuredOutput
from realizar.server.anthropic.records import CountTokensRequest, MessagesRequest, ToolChoice
from realizar.server.errors import ApiError, refused, unsupported
from realizar.server.generation.conversation import (
    MAX_MESSAGES,
    Conversation,
    can_continue,
    check_num_messages,
    image_part,
    log_once,
    parts_of,
    text_part,
    turn,
)
from realizar.server.generation.objects import check_fields, checked, optional, text_in
from realizar.server.generation.sampling import SamplingWishes
from realizar.server.generation.tools import ToolPlan, read_functions
from realizar.server.http.unknown_fields import known_only

_LOG = logging.getLogger(__name__)
_BILLING = "x-anthropic-billing-header:"
_PLAIN = ("max_tokens", "temperature", "top_k", "top_p")
_NAMES = {"stop": "stop_sequences", "structured": "output_config.format"}
_KEPT_EDIT = "clear_thinking_20251015"  # templates drop earlier reasoning by themselves


def read_conversation(request: CountTokensRequest) -> Conversation:
    """Check a request and read it. A count of tokens is read like a request for the shortest answer.

    Raises ApiError or InvalidRequestError, naming the field, where the request is refused.
    """
    _check_without_effect(request)
    tools = _read_tools(request.tools, request.tool_choice)
    structured = _structured(request)
    messages = _read_messages(request.messages)
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
    texts = _read_system(request.system)
    kept = [_without_header(text) for text in texts]
    if kept != texts:
        log_once(_LOG, "lines of system prompts that begin with %s are left out of prompts", _BILLING[:-1])
    return "\n\n".join(text for text, given in zip(kept, texts, strict=True) if text or not given)


def _without_header(text: str) -> str:
    """A text without its first line where that is the header: proxies join the blocks of a prompt to one text."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING) else text


def _wishes(request: CountTokensRequest, structured: StructuredOutput | None) -> SamplingWishes:
    if not isinstance(request, MessagesRequest):
        return SamplingWishes(plain={"max_tokens": 1}, structured=structured)
    return SamplingWishes(
        plain={name: value for name in _PLAIN if (value := getattr(request, name)) is not None},
        stop=request.stop_sequences,
        structured=structured,
    )


def _structured(request: CountTokensRequest) -> StructuredOutput | None:
    form = None if request.output_config is None else request.output_config.format
    return None if form is None else StructuredOutput("json_schema", json.dumps(form.schema))


def _variables(request: CountTokensRequest) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    return variables


def _check_without_effect(request: CountTokensRequest) -> None:
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
    edits = optional("context_management.edits", management.get("edits"), list)
    for place, edit in enumerate(edits or ()):
        if not isinstance(edit, dict) or edit.get("type") != _KEPT_EDIT:
            path = f"context_management.edits.{place}.type"
            raise unsupported(path, f"must be {_KEPT_EDIT}: the server edits no conversation")


def _check_thread(thread: object) -> None:
    """Refuse a thread, which Anthropic's client begins unasked, in the form by which it then sends the whole
    conversation.
    """
    if thread is not None:
        message = "thread is not supported: the server holds no conversation; send all of it in messages"
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, message, param="thread", code="unsupported_parameter", details=details)


# Content blocks of Anthropic's messages, converted to the messages that chat templates take.
#
# One message may become several: each result of a tool is a message of its own, and blocks of text, reasoning and
# calls of an assistant are one.

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("type", "text", "cache_control", "citations"),
    "image": ("type", "source", "cache_control"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller", "toolset_name"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"),
}
_OF_ROLE = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
_MEDIA = ("document", "container_upload")
_KINDS = {"cache_control": dict, "is_error": bool, "signature": str, "data": str}
"""Kinds of the fields that change no prompt; each may be null."""


def _read_messages(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and convert them for the template. Neighbours of one role become one message.

    Raises ApiError: 400; `param` is the path.
    """
    check_num_messages(given)
    runs: list[list[dict[str, Any]]] = []
    for place, message in enumerate(given):
        for converted in _converted(f"messages.{place}", message):
            _append(runs, converted)
    if len(runs) > MAX_MESSAGES:
        raise refused(
            f"messages has {len(runs)} texts and results of tools; at most {MAX_MESSAGES} are allowed", "messages"
        )
    messages = [_joined(run) for run in runs]
    if messages[-1]["role"] == "assistant" and not can_continue(messages[-1]):
        raise refused("a last message of the assistant's is continued: it must have text and no calls", "messages")
    return messages


def _read_system(given: str | Sequence[dict[str, Any]] | None) -> list[str]:
    """The texts of the system prompt, in order. Raises ApiError: 400; `param` is the path."""
    if isinstance(given, str):
        return [given] if given else []
    return [_text(f"system.{place}", block) for place, block in enumerate(given or ())]


def _append(runs: list[list[dict[str, Any]]], message: dict[str, Any]) -> None:
    last = runs[-1][-1] if runs else {}
    plain = message.keys() | last.keys() <= {"role", "content"}
    if plain and message["role"] == last.get("role"):
        runs[-1].append(message)
    else:
        runs.append([message])


def _joined(run: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one message of a run. Texts are joined once: thousands of blocks may be one message."""
    if len(run) == 1:
        return run[0]
    contents = [message["content"] for message in run]
    if all(isinstance(content, str) for content in contents):
        return {**run[0], "content": "\n".join(contents)}
    return {**run[0], "content": [part for content in contents for part in parts_of(content)]}


def _converted(where: str, message: dict[str, Any]) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    known_only(where, message, ("role", "content"))
    if role not in ("user", "assistant", "system"):
        raise refused(f"{where}.role must be user or assistant", f"{where}.role")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not (content or role == "assistant"):  # a model may answer nothing
        raise refused(f"{where}.content must be text or a list of blocks that is not empty", f"{where}.content")
    path = f"{where}.content"
    if role == "system":
        return [{"role": role, "content": "\n".join(_text(f"{path}.{i}", block) for i, block in enumerate(content))}]
    kinds = [_kind(f"{path}.{place}", block, role) for place, block in enumerate(content)]
    if role == "user":
        return [_of_user(f"{path}.{place}", kinds[place], block) for place, block in enumerate(content)]
    return [_of_assistant(path, kinds, content)]


def _of_user(where: str, kind: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "text":
        return {"role": "user", "content": _text(where, block)}
    if kind == "image":
        return {"role": "user", "content": [_image(where, block)]}
    call = text_in(where, block, "tool_use_id")
    content = block.get("content")
    if isinstance(content, list):
        content = _result(f"{where}.content", content)
    elif not isinstance(content, str | None):
        raise refused(f"{where}.content must be text or a list of blocks", f"{where}.content")
    return {"role": "tool", "tool_call_id": call, "content": content or ""}


def _result(where: str, blocks: Sequence[Any]) -> str | list[dict[str, Any]]:
    """A tool's texts in one, or parts where images are among them."""
    parts = []
    for place, block in enumerate(blocks):
        path = f"{where}.{place}"
        if isinstance(block, dict) and block.get("type") == "image":
            check_fields(path, block, _FIELDS["image"], _KINDS)
            parts.append(_image(path, block))
        else:
            parts.append(text_part(_text(path, block)))
    return parts if any("image" in part for part in parts) else "\n".join(part["text"] for part in parts)


def _image(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an image: of `source` in base64, or with a data URI."""
    path = f"{where}.source"
    source = checked(path, block.get("source"), dict)
    kind = source.get("type")
    if kind == "url":
        known_only(path, source, ("type", "url"))
        return image_part(GivenImage(path, url=text_in(path, source, "url")))
    if kind != "base64":
        raise refused(f"{path}.type must be base64 or url", f"{path}.type")
    known_only(path, source, ("type", "media_type", "data"))
    media_type = source.get("media_type")
    if media_type not in MEDIA_TYPES:
        raise refused(f"{path}.media_type must be one of {', '.join(MEDIA_TYPES)}", f"{path}.media_type")
    return image_part(GivenImage(path, base64=text_in(path, source, "data"), media_type=media_type))


def _of_assistant(path: str, kinds: Sequence[str], blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, (kind, block) in enumerate(zip(kinds, blocks, strict=True)):
        where = f"{path}.{place}"
        if kind == "text":
            texts.append(_text(where, block))
        elif kind == "thinking":
            thoughts.append(text_in(where, block, "thinking", may_be_empty=True))
        elif kind == "tool_use":
            calls.append(_call(where, block))
    return turn("assistant", texts, thoughts, calls)


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = checked(f"{where}.input", block.get("input"), dict)
    function = {"name": text_in(where, block, "name"), "arguments": arguments}
    return {"id": text_in(where, block, "id"), "type": "function", "function": function}


def _kind(where: str, block: Any, role: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise refused(f"{where} must be an object with a type", where)
    if kind in _MEDIA:
        message = f"{where}.type '{kind}' is not supported: models read text, and images as 'image'"
        raise refused(message, f"{where}.type")
    if kind not in _OF_ROLE[role]:
        known = ", ".join(_OF_ROLE[role])
        raise refused(f"{where}.type {kind[:40]!a} is not supported for the role {role}: {known} are", f"{where}.type")
    check_fields(where, block, _FIELDS[kind], _KINDS)
    return kind


def _text(where: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        raise refused(f"{where}.type must be 'text'", f"{where}.type")
    check_fields(where, block, _FIELDS["text"], _KINDS)
    return text_in(where, block, "text", may_be_empty=True)


_WITHOUT_EFFECT = ("cache_control", "eager_input_streaming", "allowed_callers")
_KNOWN = ("type", "name", "description", "input_schema", "strict", *_WITHOUT_EFFECT)


def _read_tools(given: Sequence[dict[str, Any]] | None, choice: ToolChoice | None) -> ToolPlan:
    """Make the plan from a request's `tools` and `tool_choice`. Raises ApiError: 400; `param` is the path."""
    tools = read_functions(given, "tools.{}", _converted_tool, ".name", ".input_schema")
    if choice is None:
        return ToolPlan(tools)
    if choice.type != "tool" and choice.name is not None:
        raise refused("tool_choice.name needs tool_choice.type to be tool", "tool_choice.name")
    if choice.type == "none":
        return ToolPlan()
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto":
        return ToolPlan(tools, parallel=parallel)
    if not tools:
        raise refused(f"tool_choice.type is '{choice.type}', but the request has no tools", "tool_choice")
    if choice.type == "any":
        return ToolPlan(tools, required=True, parallel=parallel)
    if choice.name not in (tool["function"]["name"] for tool in tools):
        raise refused("tool_choice.name must be the name of one of tools", "tool_choice.name")
    return ToolPlan(tools, name=choice.name, parallel=False)


def _converted_tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{where}.type", "must be 'custom': the server runs no tools of its own")
    known = _KNOWN if tool.get("defer_loading") else (*_KNOWN, "defer_loading")
    check_fields(where, tool, known, {"description": str, "strict": bool})
    function: dict[str, Any] = {
        "name": text_in(where, tool, "name", may_be_empty=True),
        "parameters": checked(f"{where}.input_schema", tool.get("input_schema"), dict),
    }
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}
