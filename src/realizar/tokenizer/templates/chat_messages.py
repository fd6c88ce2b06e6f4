"""Conversion of messages, in the format of OpenAI's API, to the form that a template expects.

Templates expect different forms: content as text or as parts, arguments of tool calls as text or as objects, missing
content as null or as empty text. `find_traits` finds the expected form by rendering small conversations. Standard
library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from realizar.errors import ChatTemplateError, InvalidRequestError

Message: TypeAlias = Mapping[str, Any]
Messages: TypeAlias = Sequence[Message]
Tools: TypeAlias = Sequence[Mapping[str, Any]]  # function descriptions in the format of OpenAI's API
_NEEDLE = "needle7"
_LEAD_CHARACTERS = 8  # of what a template writes before a result, to tell results from messages


class TemplateFailedError(ChatTemplateError):
    """A template is malformed, or fails on a conversation; it may work for others."""


class TemplateBoundsError(ChatTemplateError):
    """A template exceeds its bounds of time or memory; it is not tried again."""


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """The forms of messages that a template accepts.

    Attributes:
        knows_developer: the template has a role `developer`; otherwise the role becomes `system`.
        needs_parts: it shows content only as a list of parts.
        takes_parts: it shows the text of parts.
        takes_null: it accepts null content beside tool calls.
        needs_argument_text: it shows arguments of tool calls correctly only as text.
        needs_tool_responses: it shows the results of calls in the message that made them, as `tool_responses`.
        reasoning_is_thinking: its messages have their reasoning in the field `thinking`.
        one_beside_calls: beside calls such a message takes reasoning or content, and not both.
    """

    knows_developer: bool
    needs_parts: bool
    takes_parts: bool
    takes_null: bool
    needs_argument_text: bool
    needs_tool_responses: bool
    reasoning_is_thinking: bool
    one_beside_calls: bool


def with_texts(messages: Messages) -> list[dict[str, Any]]:
    """Copied; InvalidRequestError where a message has no role, or its content is neither text nor parts of text and
    marks of images.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    return [_checked(place, message) for place, message in enumerate(messages)]


def _checked(place: int, message: Any) -> dict[str, Any]:
    where = f"messages[{place}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise InvalidRequestError(f"{where} must be an object with a role", "messages")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"{where}.content must be text or a list of parts", "messages")
    for part in content:
        if not _is_image(part) and not _is_text(part):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(f"{where}.content: a part of type {kind!r} is not supported", "messages")
    return dict(message)


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_image(part: Any) -> bool:
    """True for the mark of an image, which has no other fields."""
    return isinstance(part, Mapping) and part == {"type": "image"}


def has_images(content: Any) -> bool:
    return isinstance(content, list | tuple) and any(map(_is_image, content))


def adapt_messages(messages: Sequence[dict[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    if traits.needs_tool_responses:
        messages = with_tool_responses(messages)
    return [_adapt(message, traits) for message in messages]


def _adapt(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    if message["role"] == "developer" and not traits.knows_developer:
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, str) and traits.needs_parts:
        message["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list | tuple) and not traits.takes_parts:
        message["content"] = plain_text(content)
    elif content is None and not traits.takes_null:
        message["content"] = ""
    if traits.reasoning_is_thinking and "reasoning_content" in message:
        _move_reasoning(message, merges=traits.one_beside_calls)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_with_arguments(call, as_text=traits.needs_argument_text) for call in calls]
    return message


def _move_reasoning(message: dict[str, Any], *, merges: bool) -> None:
    """Put reasoning into the field `thinking`; if it `merges` them, content beside calls goes there too."""
    thinking = message.pop("reasoning_content")
    content = message.get("content")
    if merges and message.get("tool_calls") and isinstance(content, str) and content:
        thinking, message["content"] = f"{thinking}\n\n{content}" if thinking else content, ""
    if thinking:
        message["thinking"] = thinking


def _with_arguments(call: Any, *, as_text: bool) -> Any:
    """Convert a tool call's arguments to text or to an object; text that is not a JSON object stays."""
    if not isinstance(call, Mapping):
        return call
    holder = call.get("function", call)
    if not isinstance(holder, Mapping) or "arguments" not in holder:
        return call
    arguments = holder["arguments"]
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        arguments = _as_object(arguments or "{}")
    changed = {**holder, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _as_object(text: str) -> Any:
    """The object whose JSON a text is, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def find_traits(source: str, render: Callable[[Messages], str]) -> TemplateTraits:
    """Find a template's traits by rendering small conversations; `render` raises TemplateFailedError."""

    def shown(*messages: Message) -> str:
        try:
            return render([*messages])
        except TemplateFailedError:
            return ""

    question = {"role": "user", "content": _NEEDLE}
    parts = {"role": "user", "content": [{"type": "text", "text": _NEEDLE}]}
    text_shown = _NEEDLE in shown(question)
    with_parts = shown(parts)
    takes_parts = _NEEDLE in with_parts and not ("{" in with_parts and "'type'" in with_parts)
    needs_text = False
    takes_null = True
    if "tool_calls" in source:
        as_object = shown(question, _call({_NEEDLE: "v"}))
        as_text = shown(question, _call(json.dumps({_NEEDLE: "v"})))
        key = f'"{_NEEDLE}"'
        needs_text = key not in as_object and key in as_text and f"'{_NEEDLE}'" in as_object
        with_null = as_text if needs_text else as_object
        takes_null = bool(with_null) and "None" not in with_null
    is_thinking = "message.thinking" in source and "reasoning_content" not in source
    return TemplateTraits(
        knows_developer="developer" in source,
        needs_parts=takes_parts and not text_shown,
        takes_parts=takes_parts,
        takes_null=takes_null,
        needs_argument_text=needs_text,
        needs_tool_responses="tool_responses" in source and _shows_responses_alone(shown),
        reasoning_is_thinking=is_thinking,
        one_beside_calls=is_thinking and not _shows_reasoning_and_content(shown),
    )


def _shows_reasoning_and_content(shown: Callable[..., str]) -> bool:
    thinking, content = "needle5", "needle6"
    call = {**_call({"x": "y"}), "thinking": thinking, "content": content}
    text = shown({"role": "user", "content": "x"}, call)
    return thinking in text and content in text


def _shows_responses_alone(shown: Callable[..., str]) -> bool:
    """True if a template shows a result as a result only in `tool_responses`, and not as a message of its own."""
    result = "needle8"
    question, call = {"role": "user", "content": "x"}, {**_call({"x": "y"}), "content": ""}
    as_response = shown(question, {**call, "tool_responses": [{"name": "f", "response": result}]})
    as_message = shown(question, call, {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": result})
    before, found, _ = as_response.partition(result)
    return bool(found) and before[-_LEAD_CHARACTERS:] + result not in as_message


def _call(arguments: Any) -> Message:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def with_tool_responses(messages: Messages) -> list[dict[str, Any]]:
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
            given.append({"name": name, "response": _as_object(plain_text(message.get("content")))})
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
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
    place = ids.index(call_id) if call_id is not None and call_id in ids else min(place, len(functions) - 1)
    name = functions[place].get("name") if functions and isinstance(functions[place], Mapping) else None
    return name if isinstance(name, str) else "unknown"


def plain_text(content: Any) -> str:
    """A content's text, of parts one below the other.

    InvalidRequestError: it has images, which would be lost where a template takes no parts.
    """
    if isinstance(content, list | tuple):
        if has_images(content):
            raise InvalidRequestError("the model's chat template shows no image in such a message", "messages")
        return "\n".join(part["text"] for part in content)
    return content or ""
