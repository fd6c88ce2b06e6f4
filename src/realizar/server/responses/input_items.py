"""Items of a request's `input`, converted to the messages that chat templates take.

Several items may be one message: reasoning, text and calls of the model that follow one another, and texts of one role.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realizar.server.errors import refused, unsupported
from realizar.server.http.unknown_fields import known_only
from realizar.server.responses.custom_calls import arguments_of
from realizar.server.responses.reasoning import revealed
from realizar.server.responses.tools import full_name

_COMMON = ("type", "id", "status")
_PARSED = ("parsed_arguments", "parsed")  # openai's `parse` adds them to what it gives, and LangChain sends them back
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": (*_COMMON, "role", "content", "phase"),
    "function_call": (*_COMMON, "call_id", "name", "arguments", "namespace", "caller", "async", "created_by", *_PARSED),
    "function_call_output": (*_COMMON, "call_id", "output", "caller", "name", "namespace", "created_by"),
    "custom_tool_call": (*_COMMON, "call_id", "name", "input", "namespace", "caller", "async", "created_by"),
    "custom_tool_call_output": (*_COMMON, "call_id", "output", "caller", "name", "namespace", "created_by"),
    "reasoning": (*_COMMON, "summary", "content", "encrypted_content"),
}
_PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "input_text": ("text", ("type", "text", "prompt_cache_breakpoint")),
    "output_text": ("text", ("type", "text", "annotations", "logprobs", *_PARSED)),
    "refusal": ("refusal", ("type", "refusal")),
    "summary_text": ("text", ("type", "text")),
    "reasoning_text": ("text", ("type", "text")),
    "text": ("text", ("type", "text")),
}
"""Types of parts: the field of the text, and all fields."""
_MEDIA = ("input_image", "input_file", "input_audio", "input_video", "computer_screenshot")
_TYPES: Mapping[str, tuple[type, str]] = {
    **dict.fromkeys(("id", "status", "phase", "namespace", "created_by", "name", "encrypted_content"), (str, "text")),
    **dict.fromkeys(("caller", "prompt_cache_breakpoint"), (dict, "an object")),
    **dict.fromkeys(("annotations", "logprobs"), (list, "a list")),
    "async": (bool, "true or false"),
}
"""Types of the fields that change no prompt, or may be null."""
_SPOKEN = ("input_text", "output_text", "refusal")
_OF_ROLE = {"assistant": _SPOKEN} | dict.fromkeys(("user", "system", "developer"), ("input_text", "output_text"))


@dataclass(slots=True)
class _Message:
    """A message that grows; its texts are joined once, as there may be thousands."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_id: str = ""

    def converted(self) -> dict[str, Any]:
        if self.role == "tool":
            return {"role": "tool", "tool_call_id": self.call_id, "content": "\n".join(self.texts)}
        content = "\n\n".join(self.texts) if self.texts or not self.calls else None
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.thoughts:
            message["reasoning_content"] = "\n\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ItemReader:
    """Reads the items of a conversation in their order."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._calls: dict[str, bool] = {}  # True once a call has its output

    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return [message.converted() for message in self._messages]

    def read(self, where: str, item: dict[str, Any]) -> None:
        """Read the next item.

        Args:
            where: its path in the request.

        Raises:
            ApiError: 400; `param` is the path.
        """
        kind = item.get("type", "message")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise _foreign(where, kind)
        _check_fields(where, item, _FIELDS[kind])
        match kind:
            case "message":
                self._read_message(where, item)
            case "function_call":
                self._read_call(where, item)
            case "custom_tool_call":
                self._read_custom_call(where, item)
            case "function_call_output" | "custom_tool_call_output":
                self._read_output(where, item)
            case _:
                self._read_reasoning(where, item)

    def add_text(self, role: str, text: str) -> None:
        """Add a text of a role."""
        self._of(role).texts.append(text)

    def _of(self, role: str) -> _Message:
        """The last message if it is of this role, otherwise a new one. System and developer are one role here."""
        if self._messages:
            last = self._messages[-1].role
            if last == role or {last, role} == {"system", "developer"}:
                return self._messages[-1]
        self._messages.append(_Message(role))
        return self._messages[-1]

    def _read_message(self, where: str, item: dict[str, Any]) -> None:
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or role not in _OF_ROLE:
            raise refused(f"{where}.role must be one of {', '.join(_OF_ROLE)}", f"{where}.role", "invalid_value")
        if isinstance(content, str):
            self.add_text(role, content)
            return
        texts = _texts(f"{where}.content", content, _OF_ROLE[role])
        if not texts and role != "assistant":
            raise refused(f"{where}.content must not be empty", f"{where}.content", "empty_array")
        self.add_text(role, "".join(texts) if role == "assistant" else "\n".join(texts))

    def _read_call(self, where: str, item: dict[str, Any]) -> None:
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise refused(f"{where}.arguments must be JSON text", f"{where}.arguments")
        self._add_call(where, item, arguments)

    def _read_custom_call(self, where: str, item: dict[str, Any]) -> None:
        self._add_call(where, item, arguments_of(_required(where, item, "input", may_be_empty=True)))

    def _add_call(self, where: str, item: dict[str, Any], arguments: str) -> None:
        call_id, name = _required(where, item, "call_id"), _required(where, item, "name")
        if call_id in self._calls:
            raise refused(f"{where}.call_id is that of an earlier call", f"{where}.call_id", "invalid_value")
        self._calls[call_id] = False
        function = {"name": full_name(item.get("namespace"), name), "arguments": arguments}
        self._of("assistant").calls.append({"id": call_id, "type": "function", "function": function})

    def _read_output(self, where: str, item: dict[str, Any]) -> None:
        call_id, output = _required(where, item, "call_id"), item.get("output")
        if call_id not in self._calls:
            raise refused(f"{where}.call_id names no earlier call", f"{where}.call_id", "invalid_value")
        if self._calls[call_id]:
            raise refused(f"{where}.call_id names a call that has its output", f"{where}.call_id", "invalid_value")
        self._calls[call_id] = True
        texts = [output] if isinstance(output, str) else _texts(f"{where}.output", output, ("input_text",))
        self._messages.append(_Message("tool", texts, call_id=call_id))

    def _read_reasoning(self, where: str, item: dict[str, Any]) -> None:
        texts = revealed(item.get("encrypted_content"))
        shown = [
            _texts(f"{where}.{name}", item[name], kinds)
            for name, kinds in (("content", ("reasoning_text", "text")), ("summary", ("summary_text",)))
            if item.get(name) is not None
        ]
        found = [texts] if texts else next(filter(None, shown), [])
        if found:
            self._of("assistant").thoughts += found


def _foreign(where: str, kind: Any) -> Exception:
    path = f"{where}.type"
    return unsupported(path, f"{ascii(kind)[:60]} is not supported: {', '.join(_FIELDS)} are")


def _texts(where: str, parts: Any, kinds: Sequence[str]) -> list[str]:
    """The texts of parts of some kinds."""
    if not isinstance(parts, list):
        raise refused(f"{where} must be text or a list of parts", where)
    return [_text(f"{where}[{place}]", part, kinds) for place, part in enumerate(parts)]


def _text(where: str, part: Any, kinds: Sequence[str]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise refused(f"{where} must be an object with a type", where)
    if kind in _MEDIA:
        path = f"{where}.type"
        raise refused(f"{path}: '{kind}' is not supported: the model reads text only", path, "unsupported_content")
    if kind not in kinds:
        expected = " or ".join(kinds)
        raise refused(f"{where}.type must be {expected}, not {kind[:40]!a}", f"{where}.type", "invalid_value")
    name, known = _PARTS[kind]
    _check_fields(where, part, known)
    return _required(where, part, name, may_be_empty=True)


def _check_fields(where: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuse unknown fields, and wrong types of those that are otherwise not looked at."""
    known_only(where, given, known)
    for name, value in given.items():
        wanted, words = _TYPES.get(name, (object, ""))
        if value is not None and not isinstance(value, wanted):
            raise refused(f"{where}.{name} must be {words}", f"{where}.{name}", "invalid_type")


def _required(where: str, given: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise refused(f"{where}.{name} must be text", f"{where}.{name}")
    return value
