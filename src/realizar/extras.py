"""Installation hints for optional dependencies. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that installs an extra of realizar, which no package index has under its name.

    Args:
        extra: a name from `[project.optional-dependencies]`, such as `cuda`.
    """
    clone = Path(__file__).resolve().parents[2]
    if (clone / "pyproject.toml").is_file():
        return f"{sys.executable} -m pip install -e '{clone}[{extra}]'"
    return f"pip install '.[{extra}]' in a clone of realizar"
