"""A conversation and its commands, apart from the terminal that shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realizar.cli.chat_window import ContextWindow, Message
from realizar.cli.options.arguments import checked_text
from realizar.cli.options.sampling import describe, parse_assignments
from realizar.errors import InvalidRequestError
from realizar.sampling_params import SamplingParams
from realizar.strict_json import StrictJSONError, is_too_large, parse_strictly

HELP = """\
/help            this list
/system [TEXT]   set the system message, or drop it; the conversation starts over
/clear           start the conversation over
/retry           answer the last message again
/undo            take back the last message and its answer
/params [N=V]    show the sampling parameters, or set some: /params temperature=0.5 top_k=40
/save FILE       write the conversation as JSON
/load FILE       go on with a conversation that /save wrote
/quit            leave (also /exit, /bye and Ctrl-D)
A message whose first word is a path, or code such as //, is no command.
A line that ends with a backslash goes on; so does one after Escape and Enter. Pasted lines are one message.
Ctrl-C stops an answer."""

_SHOWN_CHARACTERS = 60
_COMMAND = re.compile(r"/(\w*)(?:[ \t]+(.*))?", re.DOTALL)
_OTHER_NAMES = {"exit": "quit", "bye": "quit"}

Answer = Callable[[list[Message], SamplingParams], Iterator[str]]


@dataclass
class ChatSession:
    """The messages of a conversation, and the effect of the user's lines on them.

    Attributes:
        answer: streams the text deltas of an answer to messages.
        params: sampling parameters of the next answer.
        system: system message, or None.
        finished: True once the user has quit.
        window: the part of the conversation that the model still sees; None is all of it.
        remembered: tells what of the last answer stays in the conversation; None is all of it.
    """

    answer: Answer
    params: SamplingParams
    system: str | None = None
    finished: bool = False
    window: ContextWindow | None = None
    remembered: Callable[[], str] | None = None
    _messages: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """The system message, if there is one, and the conversation."""
        return [*self._system_messages(), *self._messages]

    @property
    def meter(self) -> str:
        """How full the context is, such as `512 of 8,192 tokens, 6 %`; empty where that is not known.

        An answer that filled the context is followed by the template's marks, which have no place there: it is full.
        """
        if self.window is None:
            return ""
        used, length = self.window.used(self._system_messages(), self._messages), self.window.context_length
        if used is None:
            return ""
        used = min(used, length)
        return f"{used:,} of {length:,} tokens, {used / length:.0%}".replace("%", " %")

    @staticmethod
    def asks(line: str) -> bool:
        """True if the model answers a line."""
        command = _command_of(line)
        return bool(line.strip()) and (command is None or command[0] == "retry")

    def handle(self, line: str) -> Iterator[str]:
        """Handle a line, and iterate the text to show: deltas of an answer, or a command's result.

        If an answer is interrupted or fails before its first delta, its question is removed. Otherwise its beginning
        stays in the conversation.

        Raises:
            InvalidRequestError: the command is invalid; the conversation stays as it was.
        """
        command = _command_of(line)
        if command is not None:
            name, rest = command
            run = getattr(self, f"_command_{_OTHER_NAMES.get(name, name)}", None)
            if run is None or not name.isalpha():
                raise InvalidRequestError(f"/{name} is not a command; /help lists them")
            yield from run(rest)
        elif line.strip():
            before = list(self._messages)
            self._messages.append({"role": "user", "content": line.strip()})
            yield from self._answer(before)

    def _answer(self, before: list[Message]) -> Iterator[str]:
        """Answer the last message. The conversation is reset to `before` if the answer is empty."""
        said: list[str] = []
        try:
            shown, params = self.messages, self.params
            if self.window is not None:
                shown, params = self.window.shown(self._system_messages(), self._messages, params)
            for delta in self.answer(shown, params):
                said.append(delta)
                yield delta
        finally:
            if said:
                content = "".join(said) if self.remembered is None else self.remembered()
                self._messages.append({"role": "assistant", "content": content})
            else:
                self._messages[:] = before

    def _system_messages(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _start_over(self) -> None:
        self._messages.clear()
        if self.window is not None:
            self.window.clear()

    def _command_help(self, _rest: str) -> Iterator[str]:
        yield HELP

    def _command_clear(self, _rest: str) -> Iterator[str]:
        self._start_over()
        yield "(the conversation starts over)"

    def _command_system(self, rest: str) -> Iterator[str]:
        self.system = rest or None
        said = "system message set" if rest else "no system message"
        yield f"({said}; the conversation starts over)" if self._messages else f"({said})"
        self._start_over()

    def _command_retry(self, _rest: str) -> Iterator[str]:
        before = list(self._messages)
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages:
            raise InvalidRequestError("/retry needs a question first")
        yield from self._answer(before)

    def _command_params(self, rest: str) -> Iterator[str]:
        if rest:
            self.params = parse_assignments(rest, self.params)
        yield describe(self.params)

    def _command_undo(self, _rest: str) -> Iterator[str]:
        asked = [place for place, message in enumerate(self._messages) if message["role"] == "user"]
        if not asked:
            raise InvalidRequestError("/undo needs a message first")
        taken = self._messages[asked[-1]]["content"].split("\n", 1)[0]
        del self._messages[asked[-1] :]
        yield f"(taken back: {taken[:_SHOWN_CHARACTERS]})"

    def _command_save(self, rest: str) -> Iterator[str]:
        if not rest:
            raise InvalidRequestError("/save needs the name of a file")
        _write_chat(rest, self.messages)
        yield f"(saved {len(self.messages)} messages to {rest})"

    def _command_load(self, rest: str) -> Iterator[str]:
        if not rest:
            raise InvalidRequestError("/load needs the name of a file")
        system, messages = _read_chat(rest)
        self._start_over()
        self.system = system
        self._messages.extend(messages)
        hint = "; /retry answers the last one" if messages and messages[-1]["role"] == "user" else ""
        yield f"(loaded {len(self.messages)} messages from {rest}{hint})"

    def _command_quit(self, _rest: str) -> Iterator[str]:
        self.finished = True
        yield from ()


def _command_of(line: str) -> tuple[str, str] | None:
    """The name and the rest of a command; None for a message, such as a path, or pasted code that begins with `/*`."""
    found = _COMMAND.fullmatch(line.strip())
    return None if found is None else (found[1], (found[2] or "").strip())


# Conversations in files, as `/save` writes them and `/load` reads them.

_MOST_BYTES = 64 << 20
_MOST_VALUES = 1 << 20
_ROLES = ("system", "user", "assistant")


def _write_chat(name: str, messages: Sequence[Message]) -> None:
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
            _read_chat(name)
        except InvalidRequestError:
            raise InvalidRequestError(f"{name} is there and is no conversation; /save it to another file") from None


def _read_chat(name: str) -> tuple[str | None, list[Message]]:
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
