"""Results of tools as a part of the messages that called them, for templates that want them there.

Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def with_tool_responses(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Move results of tools into the field `tool_responses` of the assistant's message before them.

    The assistant's text after the results goes into the same message, as it is one turn for the model. Results without
    calls before them stay.
    """
    moved: list[dict[str, Any]] = []
    for message in messages:
        last = moved[-1] if moved else {}
        if message["role"] == "tool" and last.get("tool_calls"):
            given = last.setdefault("tool_responses", [])
            name = message.get("name") or _name_of(last["tool_calls"], message.get("tool_call_id"), len(given))
            given.append({"name": name, "response": _response(message.get("content"))})
        elif (
            message["role"] == "assistant"
            and "tool_responses" in last
            and not message.get("tool_calls")
            and not last.get("content")
        ):
            last["content"] = message.get("content")
        else:
            moved.append(dict(message))
    return moved


def _name_of(calls: Sequence[Any], call_id: Any, place: int) -> str:
    """The name of the call with an id, or of the call at a place."""
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
    place = ids.index(call_id) if call_id is not None and call_id in ids else min(place, len(functions) - 1)
    name = functions[place].get("name") if functions and isinstance(functions[place], Mapping) else None
    return name if isinstance(name, str) else "unknown"


def _response(content: Any) -> Any:
    """A result as an object if its text is one of JSON, else as text."""
    if isinstance(content, list | tuple):
        content = "\n".join(part["text"] for part in content)
    try:
        value = json.loads(content or "")
    except (ValueError, RecursionError):
        return content or ""
    return value if isinstance(value, dict) else content
