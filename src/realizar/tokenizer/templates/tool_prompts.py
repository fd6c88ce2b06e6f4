"""Tools and calls as text in messages, for templates that do not show them. Standard library only."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from realizar.tokenizer.marks import LFM2_CALLS, LFM2_CALLS_END

_CALLING = """\
To call a function, answer with nothing but a JSON object: {"name": "<its name>", "arguments": {<its arguments>}}
To call several, answer with a JSON list of such objects. If no function is needed, answer in plain text."""


def tools_as_system_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """A text that describes functions to a model, with the form of calls that the style `json` parses.

    Args:
        tools: function descriptions in the format of OpenAI's API.
    """
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return "\n".join(["You can call these functions, described in JSON, one a line:", *lines, "", _CALLING])


def with_system_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Add a text to the end of the system message, or in a new system message."""
    copies = [dict(message) for message in messages]
    if copies[0]["role"] in ("system", "developer"):
        copies[0]["content"] = _joined(copies[0].get("content"), text)
        return copies
    return [{"role": "system", "content": text}, *copies]


def with_first_user_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Add a text and the system message's text before the first user message, for templates without a system role."""
    copies = [dict(message) for message in messages]
    if copies[0]["role"] in ("system", "developer"):
        text = _joined(_plain(copies.pop(0).get("content")), text)
    for message in copies:
        if message["role"] == "user":
            message["content"] = _joined(text, _plain(message.get("content")))
            return copies
    return [{"role": "user", "content": text}, *copies]


def has_tool_messages(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a conversation contains calls or results of tools."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def spell_tool_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write calls as the assistant's text, in the form described above, and their results as the user's text.

    A user's message after a result is appended to it, since many templates want roles to alternate.
    """
    spelled: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    follows_result = False
    for message in messages:
        role, content = message["role"], message.get("content")
        if calls := message.get("tool_calls"):
            names.update(
                {call["id"]: call["function"]["name"] for call in calls if "id" in call and "function" in call}
            )
            spelled.append({"role": role, "content": _joined(_plain(content), _spelled_calls(calls))})
        elif role == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id", ""), "")
            result = json.dumps({"result_of": name, "content": _plain(content)}, ensure_ascii=False)
            if follows_result:
                spelled[-1]["content"] += f"\n{result}"
            else:
                spelled.append({"role": "user", "content": result})
        elif role == "user" and follows_result:
            spelled[-1]["content"] += f"\n\n{_plain(content)}"
        else:
            spelled.append(dict(message))
        follows_result = role == "tool"
    return spelled


def spell_python_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write calls as LFM2 does into the assistant's text. Results stay messages, which its templates show."""
    spelled = []
    for message in messages:
        copy = dict(message)
        if calls := copy.pop("tool_calls", None):
            text = ", ".join(_python_call(call.get("function", call)) for call in calls)
            copy["content"] = f"{_plain(copy.get('content'))}{LFM2_CALLS}[{text}]{LFM2_CALLS_END}"
        spelled.append(copy)
    return spelled


def _python_call(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if isinstance(arguments, Mapping):
        arguments = ", ".join(f"{key}={_python_value(value)}" for key, value in arguments.items())
    return f"{function.get('name', '')}({arguments})"


def _python_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | Mapping) else str(value)


def _spelled_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    objects = []
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments", "{}")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        objects.append(f'{{"name": {json.dumps(function.get("name", ""))}, "arguments": {text or "{}"}}}')
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


def _plain(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part["text"] for part in content)


def _joined(first: Any, second: str) -> Any:
    if isinstance(first, list | tuple):
        return [*first, {"type": "text", "text": second}]
    return f"{first}\n\n{second}" if first and second else first or second
