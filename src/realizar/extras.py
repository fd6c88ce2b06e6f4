"""Installation hints for optional dependencies. Standard library only."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that installs an extra of realizar, which no package index has under its name.

    It is for the interpreter that runs now, by uv where that has no pip.

    Args:
        extra: a name from `[project.optional-dependencies]`, such as `cuda`.
    """
    python, clone = shlex.quote(sys.executable), Path(__file__).resolve().parents[2]
    has_pip = importlib.util.find_spec("pip") is not None
    install = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    if (clone / "pyproject.toml").is_file():
        return f"{install} -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"in a clone of realizar, {install} '.[{extra}]'"
