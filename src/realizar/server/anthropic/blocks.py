"""Content blocks of Anthropic's messages, converted to the messages that chat templates take.

One message may become several: each result of a tool is a message of its own, and blocks of text, reasoning and calls
of an assistant are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from realizar.server.errors import refused
from realizar.server.generation.conversation import MAX_MESSAGES, can_continue, check_num_messages
from realizar.server.http.unknown_fields import known_only

_FIELDS: Mapping[str, tuple[str, ...]] = {
    "text": ("type", "text", "cache_control", "citations"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller", "toolset_name"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"),
}
_OF_ROLE = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "redacted_thinking", "tool_use")}
_MEDIA = ("image", "document", "container_upload")
_TYPES: Mapping[str, tuple[type, str]] = {
    "cache_control": (dict, "an object"),
    "is_error": (bool, "true or false"),
    "signature": (str, "text"),
    "data": (str, "text"),
}
"""Types of the fields that change no prompt; each may be null."""


def read_messages(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and convert them for the template. Neighbours of one role become one message.

    Raises:
        ApiError: 400; `param` is the path.
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


def read_system(given: str | Sequence[dict[str, Any]] | None) -> list[str]:
    """The texts of the system prompt, in order.

    Raises:
        ApiError: 400; `param` is the path.
    """
    if isinstance(given, str):
        return [given] if given else []
    return [_text(f"system.{place}", block) for place, block in enumerate(given or ())]


def _append(runs: list[list[dict[str, Any]]], message: dict[str, Any]) -> None:
    """Add a message to the last run where all are texts of one role; otherwise begin a run."""
    last = runs[-1][-1] if runs else {}
    plain = message.keys() | last.keys() <= {"role", "content"}
    if plain and message["role"] == last.get("role"):
        runs[-1].append(message)
    else:
        runs.append([message])


def _joined(run: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one message of a run. Texts are joined once: thousands of blocks may be one message."""
    return run[0] if len(run) == 1 else {**run[0], "content": "\n".join(message["content"] for message in run)}


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
    call = _required(where, block, "tool_use_id")
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(_text(f"{where}.content.{place}", part) for place, part in enumerate(content))
    if not isinstance(content, str | None):
        raise refused(f"{where}.content must be text or a list of blocks", f"{where}.content")
    return {"role": "tool", "tool_call_id": call, "content": content or ""}


def _of_assistant(path: str, kinds: Sequence[str], blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, (kind, block) in enumerate(zip(kinds, blocks, strict=True)):
        where = f"{path}.{place}"
        if kind == "text":
            texts.append(_text(where, block))
        elif kind == "thinking":
            thoughts.append(_required(where, block, "thinking", may_be_empty=True))
        elif kind == "tool_use":
            calls.append(_call(where, block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise refused(f"{where}.input must be an object", f"{where}.input")
    function = {"name": _required(where, block, "name"), "arguments": arguments}
    return {"id": _required(where, block, "id"), "type": "function", "function": function}


def _kind(where: str, block: Any, role: str) -> str:
    """The type of a block that a message of this role may have."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise refused(f"{where} must be an object with a type", where)
    if kind in _MEDIA:
        raise refused(f"{where}.type '{kind}' is not supported: the model reads text only", f"{where}.type")
    if kind not in _OF_ROLE[role]:
        known = ", ".join(_OF_ROLE[role])
        raise refused(f"{where}.type {kind[:40]!a} is not supported for the role {role}: {known} are", f"{where}.type")
    _check_fields(where, kind, block)
    return kind


def _text(where: str, block: Any) -> str:
    """The text of a block where no other type may stand."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind != "text":
        reason = ": the model reads text only" if kind in _MEDIA else ""
        raise refused(f"{where}.type must be 'text'{reason}", f"{where}.type")
    _check_fields(where, "text", block)
    return _required(where, block, "text", may_be_empty=True)


def _check_fields(where: str, kind: str, block: dict[str, Any]) -> None:
    """Refuse unknown fields of a block, and wrong types of those that are otherwise not looked at."""
    known_only(where, block, _FIELDS[kind])
    for name, value in block.items():
        wanted, words = _TYPES.get(name, (object, ""))
        if value is not None and not isinstance(value, wanted):
            raise refused(f"{where}.{name} must be {words}", f"{where}.{name}")


def _required(where: str, block: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise refused(f"{where}.{name} must be text", f"{where}.{name}")
    return value
