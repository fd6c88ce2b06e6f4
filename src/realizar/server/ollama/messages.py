"""Messages of Ollama's `/api/chat`, converted to the messages that chat templates take.

Ollama's messages name the tool that a result is of, where templates want the id of its call. Calls without an id get
one, and a result without one belongs to the first call of its tool that has no result yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from realizar.images.given import GivenImage
from realizar.server.errors import refused
from realizar.server.generation.conversation import check_num_messages, image_part, parts_of, turn
from realizar.server.generation.objects import checked, optional, text_in
from realizar.server.http.unknown_fields import known_only

_EVERYWHERE = ("role", "content", "images")
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "system": _EVERYWHERE,
    "user": _EVERYWHERE,
    "assistant": (*_EVERYWHERE, "thinking", "tool_calls"),
    "tool": (*_EVERYWHERE, "tool_name", "tool_call_id", "name"),
}
_OF_CALL = ("id", "type", "index", "function")
_OF_FUNCTION = ("name", "arguments", "index", "description")


def read_messages(given: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check messages and convert them for the template. Raises ApiError: 400; `param` is the path."""
    check_num_messages(given)
    calls = _Calls()
    return [_converted(f"messages[{place}]", message, calls) for place, message in enumerate(given)]


class _Calls:
    def __init__(self) -> None:
        self._num_calls = 0
        self._open: dict[str, str] = {}  # names by id
        self._by_name: dict[str, deque[str]] = {}
        self._in_order: deque[str] = deque()

    def begin(self, call_id: str | None, name: str) -> str:
        self._num_calls += 1
        found = call_id or _made_id(self._num_calls)
        self._open[found] = name
        self._in_order.append(found)
        self._by_name.setdefault(name, deque()).append(found)
        return found

    def end(self, call_id: str | None, name: str | None) -> tuple[str, str | None]:
        """Id and name of the call that a result is of. A result of no known call keeps what it says of itself."""
        found = call_id or self._first(self._in_order if name is None else self._by_name.get(name, deque()))
        if found is None:
            self._num_calls += 1
            return _made_id(self._num_calls), name
        known = self._open.pop(found, None)
        return found, name or known

    def _first(self, ids: deque[str]) -> str | None:
        while ids:
            found = ids.popleft()
            if found in self._open:
                return found
        return None


def _made_id(number: int) -> str:
    """An id for a call that has none: nine letters and digits, which every template takes."""
    return f"call{number:05}"


def _converted(where: str, message: Mapping[str, Any], calls: _Calls) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _FIELDS:
        raise refused(f"{where}.role must be one of {', '.join(_FIELDS)}", f"{where}.role", "invalid_value")
    message = {name: value for name, value in message.items() if value is not None}
    known_only(where, message, _FIELDS[role])
    images = read_images(where, message.get("images"))
    if images and role not in ("user", "tool"):
        raise refused(f"{where}.images are of messages of users and tools", f"{where}.images", "invalid_value")
    text = _text(where, message, "content") or ""
    content = [*images, *parts_of(text)] if images else text
    if role == "tool":
        return _result(where, message, content, calls)
    thinking = _text(where, message, "thinking")
    made = _read_calls(f"{where}.tool_calls", message.get("tool_calls"), calls)
    if images:
        return {"role": role, "content": content}
    return turn(role, [text] if text else [], [thinking] if thinking else [], made)


def read_images(where: str, given: object) -> list[dict[str, Any]]:
    """Images in base64 as parts of a content; `where` is the path of what has them, empty for the request itself."""
    path = f"{where}.images" if where else "images"
    images = []
    for place, image in enumerate(optional(path, given, list) or ()):
        images.append(image_part(GivenImage(f"{path}[{place}]", base64=checked(f"{path}[{place}]", image, str))))
    return images


def _result(where: str, message: Mapping[str, Any], content: Any, calls: _Calls) -> dict[str, Any]:
    given = _text(where, message, "tool_name") or _text(where, message, "name")
    call_id, name = calls.end(_text(where, message, "tool_call_id"), given)
    return {"role": "tool", "content": content, "tool_call_id": call_id, **({"name": name} if name else {})}


def _read_calls(where: str, given: object, calls: _Calls) -> list[dict[str, Any]]:
    listed = optional(where, given, list) or ()
    converted = [_call(f"{where}[{place}]", call) for place, call in enumerate(listed)]
    for call in converted:
        call["id"] = calls.begin(call["id"], call["function"]["name"])
    return converted


def _call(where: str, given: object) -> dict[str, Any]:
    call = checked(where, given, dict)
    known_only(where, call, _OF_CALL)
    path = f"{where}.function"
    function = checked(path, call.get("function"), dict)
    known_only(path, function, _OF_FUNCTION)
    arguments = optional(f"{path}.arguments", function.get("arguments"), dict) or {}
    function = {"name": text_in(path, function, "name"), "arguments": arguments}
    return {"id": _text(where, call, "id"), "type": "function", "function": function}


def _text(where: str, value: Mapping[str, Any], name: str) -> str | None:
    return optional(f"{where}.{name}", value.get(name), str)
