"""`LineEditor` reads messages on a terminal: editing, the history of typed ones, and pasted lines as one message."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.history import History
from prompt_toolkit.input import create_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from realizar.errors import HubError
from realizar.hub.folders import user_state

_KEPT_LINES = 1000
_MOST_BYTES = 1 << 20
_PROMPT, _CONTINUED = "> ", "... "


def history_path() -> Path | None:
    """`$XDG_STATE_HOME/realizar/chat_history`, or below `~/.local/state`; None for a user without a home."""
    try:
        return user_state() / "chat_history"
    except HubError:
        return None


class LineHistory(History):
    """The history of typed messages, in a file that only its owner can read; a message is a line of the file.

    Errors of reading or writing the file are ignored. Lines are appended as they are typed, so that two terminals keep
    each other's lines. `path` None keeps the history in this process only.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> Iterable[str]:
        """The messages of earlier conversations, the newest first; the file loses those beyond the last thousand."""
        if self._path is None:
            return []
        with suppress(OSError, ValueError):
            if not self._path.is_file() or self._path.stat().st_size > 4 * _MOST_BYTES:
                return []
            lines = self._path.read_text(encoding="utf-8", errors="replace").split("\n")
            lines = [line for line in lines if line]
            if len(lines) > 2 * _KEPT_LINES:
                _rewrite(self._path, lines[-_KEPT_LINES:])
            return [_message(line) for line in reversed(lines[-_KEPT_LINES:])]
        return []

    def store_string(self, string: str) -> None:
        if self._path is None or not string.strip() or len(string) > _MOST_BYTES:
            return
        with suppress(OSError, ValueError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(f"{_line(string)}\n")


class LineEditor:
    """Reads messages at a prompt. The terminal must be both stdin and stdout.

    Enter ends a message, Escape and then Enter begins another line of it, and pasted lines belong to one message.
    """

    def __init__(self, history: LineHistory) -> None:
        output = create_output(sys.stdout)
        output.enable_cpr = False  # type: ignore[attr-defined]  # not every terminal answers where its cursor is
        self._session: PromptSession[str] = PromptSession(
            history=history,
            input=create_input(sys.stdin),
            output=output,
            key_bindings=_keys(),
            prompt_continuation=_CONTINUED,
            enable_suspend=True,
        )

    def read(self, meter: str = "", *, continued: bool = False) -> str:
        """Read a message, with the text `meter` at the right margin; EOFError is Ctrl-D, KeyboardInterrupt Ctrl-C.

        `continued`: the prompt is that of a message that goes on.
        """

        def right() -> str:
            return "" if get_app().is_done else meter

        return self._session.prompt(_CONTINUED if continued else _PROMPT, rprompt=right)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _line(message: str) -> str:
    return message.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _message(line: str) -> str:
    parts = line.split("\\\\")
    return "\\".join(part.replace("\\n", "\n").replace("\\r", "\r") for part in parts)


def _rewrite(path: Path, lines: list[str]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write("".join(f"{line}\n" for line in lines))
    partial.replace(path)
