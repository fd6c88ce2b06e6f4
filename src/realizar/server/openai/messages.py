"""Checks of a conversation's messages, field by field; errors name the path of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realizar.server.errors import refused
from realizar.server.generation.conversation import check_num_messages
from realizar.server.http.unknown_fields import known_only

_EVERYWHERE = ("role", "content", "name", "cache_control")
_REPEATED = ("parsed", "provider_specific_fields", "reasoning_details", "reasoning_items", "thinking_blocks")
"""What clients add to an assistant's message of what it says already, and send back: OpenAI's helpers, litellm."""
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "system": _EVERYWHERE,
    "developer": _EVERYWHERE,
    "user": _EVERYWHERE,
    "tool": (*_EVERYWHERE, "tool_call_id"),
    "assistant": (
        *_EVERYWHERE,
        "tool_calls",
        "reasoning_content",
        "reasoning",
        *("refusal", "audio", "function_call", "annotations", "images"),
        *_REPEATED,
    ),
}
_OF_CALL = ("id", "type", "function")
_OF_FUNCTION = ("name", "arguments")
_MEDIA = ("image_url", "input_audio", "file", "input_image", "video_url", "audio_url", "image", "audio")


def check_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and convert them for the template: null fields are dropped, except an assistant's content.

    Raises:
        ApiError: 400; `param` is the path.
    """
    check_num_messages(messages)
    return [_checked(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _checked(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role == "function":
        raise refused(f"{where}.role: 'function' is deprecated; use 'tool'", f"{where}.role", "invalid_value")
    known = _FIELDS.get(role) if isinstance(role, str) else None
    if known is None:
        expected = ", ".join(_FIELDS)
        raise refused(f"{where}.role must be one of {expected}", f"{where}.role", "invalid_value")
    known_only(where, message, known)
    checked = {name: value for name, value in message.items() if value is not None}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        _require(isinstance(checked.get(name, ""), str), f"{where}.{name}", "must be text")
    _check_cache_control(where, checked)
    for name in ("cache_control", *_REPEATED):
        checked.pop(name, None)
    for name in ("refusal", "audio", "function_call", "annotations", "images"):
        _require(not checked.pop(name, None), f"{where}.{name}", "is not supported")
    if "reasoning" in checked:
        checked.setdefault("reasoning_content", checked.pop("reasoning"))
    calls = checked.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = calls = _checked_calls(f"{where}.tool_calls", calls)
        if not calls:
            del checked["tool_calls"]
    _require(role != "tool" or bool(checked.get("tool_call_id")), f"{where}.tool_call_id", "is missing")
    if "content" in checked:
        checked["content"] = _checked_content(f"{where}.content", checked["content"])
    else:
        reasoned = "reasoning_content" in checked
        _require(bool(calls) or reasoned, f"{where}.content", "is missing")
        checked["content"] = None if calls else ""  # templates join a message's text to others
    return checked


def _checked_content(where: str, content: Any) -> Any:
    """The text of a message, or its parts, with their text alone."""
    if isinstance(content, str):
        return content
    _require(isinstance(content, list), where, "must be text or a list of parts")
    _require(bool(content), where, "must not be empty")
    return [_checked_part(f"{where}[{place}]", part) for place, part in enumerate(content)]


def _checked_part(path: str, part: Any) -> dict[str, Any]:
    _require(isinstance(part, dict), path, "must be an object")
    kind = part.get("type")
    if kind in _MEDIA:
        raise refused(
            f"{path}: parts of type '{kind}' are not supported: the model reads text only",
            f"{path}.type",
            "unsupported_content",
        )
    _require(kind == "text", f"{path}.type", "must be 'text'")
    _require(isinstance(part.get("text"), str), f"{path}.text", "must be text")
    known_only(path, part, ("type", "text", "prompt_cache_breakpoint", "cache_control"))
    _check_cache_control(path, part)
    return {"type": "text", "text": part["text"]}


def _checked_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    _require(isinstance(calls, list), where, "must be a list")
    return [_checked_call(f"{where}[{place}]", call) for place, call in enumerate(calls)]


def _checked_call(path: str, call: Any) -> dict[str, Any]:
    _require(isinstance(call, dict), path, "must be an object")
    _require(call.get("type", "function") == "function", f"{path}.type", "must be 'function'")
    known_only(path, call, (*_OF_CALL, "index", "provider_specific_fields"))
    _require(isinstance(call.get("id", ""), str), f"{path}.id", "must be text")
    function = call.get("function")
    _require(isinstance(function, dict), f"{path}.function", "must be an object")
    known_only(f"{path}.function", function, (*_OF_FUNCTION, "parsed_arguments", "provider_specific_fields"))
    name, arguments = function.get("name"), function.get("arguments", "")
    _require(isinstance(name, str) and bool(name), f"{path}.function.name", "must be text")
    _require(isinstance(arguments, str | dict), f"{path}.function.arguments", "must be JSON text")
    kept = {name: call[name] for name in _OF_CALL if name in call}
    return {**kept, "function": {name: function[name] for name in _OF_FUNCTION if name in function}}


def _check_cache_control(where: str, given: Mapping[str, Any]) -> None:
    """Check a field that changes nothing: the prefix cache needs no marks."""
    _require(isinstance(given.get("cache_control"), dict | None), f"{where}.cache_control", "must be an object")


def _require(holds: bool, path: str, what: str) -> None:
    if not holds:
        raise refused(f"{path} {what}", path, "invalid_value")
