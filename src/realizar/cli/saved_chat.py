"""Conversations in files, as `/save` writes them and `/load` reads them. Standard library and the nouns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realizar.cli.chat_window import Message
from realizar.cli.options.arguments import checked_text
from realizar.errors import InvalidRequestError
from realizar.strict_json import StrictJSONError, is_too_large, parse_strictly

_MOST_BYTES = 64 << 20
_MOST_VALUES = 1 << 20
_ROLES = ("system", "user", "assistant")


def write_chat(name: str, messages: Sequence[Message]) -> None:
    """Write messages as a JSON object with the key `messages`.

    A file that is there is replaced if it is a conversation.

    Raises:
        InvalidRequestError: the file can't be written, or is something else.
    """
    _check_replaceable(name)
    text = json.dumps({"messages": list(messages)}, ensure_ascii=False, indent=1)
    try:
        Path(name).expanduser().write_text(text + "\n", encoding="utf-8", errors="replace")
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"/save can't write {name}: {_reason(error)}") from error


def _check_replaceable(name: str) -> None:
    try:
        size = Path(name).expanduser().stat().st_size
    except (OSError, RuntimeError, ValueError):
        return  # it is not there, or writing it says why that can't be done
    if size:
        try:
            read_chat(name)
        except InvalidRequestError:
            raise InvalidRequestError(f"{name} is there and is no conversation; /save it to another file") from None


def read_chat(name: str) -> tuple[str | None, list[Message]]:
    """Read the system message, or None, and the other messages of a file: that of `/save`, or a list of messages.

    Raises:
        InvalidRequestError: the file can't be read, or holds something other than messages of text.
    """
    try:
        with Path(name).expanduser().open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidRequestError(f"/load can't read {name}: {_reason(error)}") from error
    if len(data) > _MOST_BYTES or is_too_large(data, _MOST_VALUES, _MOST_VALUES):
        raise InvalidRequestError(f"{name} is too large for a conversation")
    try:
        value = parse_strictly(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8 at byte {error.start}") from error
    except StrictJSONError as error:
        place = "" if error.position is None else f" at character {error.position}"
        raise InvalidRequestError(f"{name} is not JSON{place}: {error}") from error
    listed = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise InvalidRequestError(f"{name} holds no list of messages")
    messages = [_message(item, f"message {number} of {name}") for number, item in enumerate(listed, start=1)]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    for number, message in enumerate(messages, start=1 if system is None else 2):
        if message["role"] == "system":
            raise InvalidRequestError(f"message {number} of {name} has the role system, which only the first may have")
    return system, messages


def _message(item: Any, place: str) -> Message:
    """A message of a file, checked.

    Raises:
        InvalidRequestError: it is not a message, or has no text.
    """
    role = item.get("role") if isinstance(item, dict) else None
    if role not in _ROLES:
        raise InvalidRequestError(f"{place} has no role of {', '.join(_ROLES)}")
    content = item.get("content")
    if not isinstance(content, str):
        raise InvalidRequestError(f"{place} has no content that is text")
    return {"role": role, "content": checked_text(content, place)}


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
