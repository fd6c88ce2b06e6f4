"""The prompt of `realizar run`, from the command line, a file and piped input."""

from __future__ import annotations

import os
import select
import stat
import sys
from pathlib import Path
from typing import TextIO

from realizar.cli.options.arguments import checked_text
from realizar.errors import InvalidRequestError

_MOST_CHARACTERS = 64 << 20
"""Longer than any context, and far less than the memory."""
_SILENCE_S = 2.0


def read_prompt(words: str | None, file: Path | None) -> str:
    """Join the words and the file's text or the piped text, with two line breaks between.

    Args:
        words: words of the command line; `-` is stdin.
        file: `-` is stdin. If a file is given, piped input is not read.

    Raises:
        InvalidRequestError: a text is not UTF-8, can't be read, or is longer than any context.
    """
    from_stdin = Path("-")
    if words == "-":
        if file is not None:
            raise InvalidRequestError("the prompt - can't be combined with --prompt-file", "prompt")
        words, file = None, from_stdin
    if file is None:
        added = _piped() if words is not None else _stdin()
    else:
        added = _stdin() if file == from_stdin else _file(file)
    return "\n\n".join(checked_text(text, "the prompt") for text in (words, added) if text)


def _file(file: Path) -> str:
    try:
        with file.open(encoding="utf-8") as opened:
            return _whole(opened, str(file))
    except OSError as error:
        raise InvalidRequestError(f"{file}: {error.strerror}", "prompt_file") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{file} is not UTF-8 at byte {error.start}", "prompt_file") from error


def _stdin() -> str:
    if sys.stdin.isatty():
        print("type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr)
    return _whole(sys.stdin, "stdin")


def _piped() -> str:
    """Read a pipe or a file on stdin; empty for a terminal, /dev/null and a closed stdin."""
    try:
        descriptor = sys.stdin.fileno()
        kind = os.fstat(descriptor).st_mode
    except (OSError, ValueError):
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)):
        return ""
    if not select.select([descriptor], [], [], _SILENCE_S)[0]:
        print("stdin is read to its end and appended to the prompt (</dev/null skips it)", file=sys.stderr)
    return _whole(sys.stdin, "stdin")


def _whole(opened: TextIO, name: str) -> str:
    text = opened.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise InvalidRequestError(f"{name} has more than {_MOST_CHARACTERS >> 20} million characters", "prompt")
    return text
