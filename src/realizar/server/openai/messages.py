"""Checks of a conversation's messages, field by field; errors name the path of the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realizar.server.errors import refused
from realizar.server.generation.conversation import check_num_messages
from realizar.server.http.unknown_fields import known_only

_EVERYWHERE = ("role", "content", "name")
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
        *("refusal", "audio", "function_call", "annotations"),
    ),
}
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
    for name in ("refusal", "audio", "function_call", "annotations"):
        _require(not checked.pop(name, None), f"{where}.{name}", "is not supported")
    if "reasoning" in checked:
        checked.setdefault("reasoning_content", checked.pop("reasoning"))
    calls = checked.get("tool_calls")
    if calls is not None:
        _check_calls(f"{where}.tool_calls", calls)
        if not calls:
            del checked["tool_calls"]
    _require(role != "tool" or bool(checked.get("tool_call_id")), f"{where}.tool_call_id", "is missing")
    if "content" in checked:
        _check_content(f"{where}.content", checked["content"])
    else:
        _require(bool(calls), f"{where}.content", "is missing")
        checked["content"] = None
    return checked


def _check_content(where: str, content: Any) -> None:
    if isinstance(content, str):
        return
    _require(isinstance(content, list), where, "must be text or a list of parts")
    _require(bool(content), where, "must not be empty")
    for place, part in enumerate(content):
        path = f"{where}[{place}]"
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
        known_only(path, part, ("type", "text", "prompt_cache_breakpoint"))


def _check_calls(where: str, calls: Any) -> None:
    _require(isinstance(calls, list), where, "must be a list")
    for place, call in enumerate(calls):
        path = f"{where}[{place}]"
        _require(isinstance(call, dict), path, "must be an object")
        _require(call.get("type", "function") == "function", f"{path}.type", "must be 'function'")
        known_only(path, call, ("id", "type", "function", "index"))
        _require(isinstance(call.get("id", ""), str), f"{path}.id", "must be text")
        function = call.get("function")
        _require(isinstance(function, dict), f"{path}.function", "must be an object")
        known_only(f"{path}.function", function, ("name", "arguments"))
        name, arguments = function.get("name"), function.get("arguments", "")
        _require(isinstance(name, str) and bool(name), f"{path}.function.name", "must be text")
        _require(isinstance(arguments, str | dict), f"{path}.function.arguments", "must be JSON text")


def _require(holds: bool, path: str, what: str) -> None:
    if not holds:
        raise refused(f"{path} {what}", path, "invalid_value")
