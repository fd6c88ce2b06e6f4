"""Installation hints for optional dependencies. Standard library only."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that installs an extra of realizar, such as `cuda`, for the interpreter that runs now.

    No package index has realizar under its name. Where the interpreter has no pip, the command is uv's.
    """
    python, clone = shlex.quote(sys.executable), Path(__file__).resolve().parents[2]
    has_pip = importlib.util.find_spec("pip") is not None
    install = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    if (clone / "pyproject.toml").is_file():
        return f"{install} -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"in a clone of realizar, {install} '.[{extra}]'"
