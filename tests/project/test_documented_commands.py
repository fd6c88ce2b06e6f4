"""Commands and options that the documentation shows exist."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from pathlib import Path

import pytest

from realizar.cli.main import app

_ROOT = Path(__file__).parents[2]
_PAGES = [_ROOT / "README.md", _ROOT / "CONTRIBUTING.md", *sorted((_ROOT / "docs").rglob("*.md"))]
_CODE = re.compile(r"```.*?```|`[^`]+`", re.DOTALL)
_COMMAND = re.compile(r"\brealizar ([a-z]+(?:-[a-z]+)*)\b([^`\n]*)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


@functools.cache
def _options(command: str) -> frozenset[str]:
    """Options that the help of a command lists."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        app([command, "--help"], result_action="return_value")
    return frozenset(_OPTION.findall(text.getvalue())) | {"--help"}


def unknown(page: str) -> list[str]:
    """Commands and options on a page that do not exist."""
    found: list[str] = []
    for code in _CODE.findall(re.sub(r"```python\n.*?```", "", page, flags=re.DOTALL)):
        for command, rest in _COMMAND.findall(code.replace("\\\n", " ")):
            if command not in set(app):
                found.append(command)
            else:
                found += [f"{command} {option}" for option in _OPTION.findall(rest) if option not in _options(command)]
    return found


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    assert unknown(page.read_text(encoding="utf-8")) == []


def test_what_does_not_exist_is_found() -> None:
    page = (
        "`realizar serve M --port 1 --prot 2`\n```\nrealizar sevre M\n```\n```python\nfrom realizar import LLM\n```\n"
    )
    assert sorted(unknown(page)) == ["serve --prot", "sevre"]
