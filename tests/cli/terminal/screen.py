"""The text that a terminal of a given width shows after what was written to it; unknown control codes are refused."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|([\r\n])|([^\x00-\x08\x0b-\x1f\x7f-\x9f])")


def shown(written: str) -> list[str]:
    """Lines without trailing spaces. Lines longer than the terminal are not broken."""
    lines, row, column, place = [""], 0, 0, 0
    while place < len(written):
        match = _PART.match(written, place)
        assert match, f"a control code reached the terminal: {written[place : place + 20]!r}"
        place = match.end()
        arguments, command, move, char = match.groups()
        if move == "\r":
            column = 0
        elif move == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif command == "A":
            row -= int(arguments or 1)
            assert row >= 0, "the cursor left the text"
        elif (arguments, command) == ("2", "K"):
            lines[row] = ""
        elif char:
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
        else:
            assert command == "m" or (arguments, command) in (("?25", "l"), ("?25", "h")), match.group()
    while len(lines) > row + 1 and not lines[-1].strip():  # below the cursor
        lines.pop()
    return [line.rstrip() for line in lines]
