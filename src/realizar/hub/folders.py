"""The user's folders for caches, for data and for state. Standard library only.

They are not created here. Where the user has no home, asking for one raises HubError.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from realizar.errors import HubError


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/realizar`, or `~/.cache/realizar`."""
    return _folder("XDG_CACHE_HOME", Path(".cache"))


def user_data() -> Path:
    """`$XDG_DATA_HOME/realizar`, or `~/.local/share/realizar`."""
    return _folder("XDG_DATA_HOME", Path(".local/share"))


def user_state() -> Path:
    """`$XDG_STATE_HOME/realizar`, or `~/.local/state/realizar`."""
    return _folder("XDG_STATE_HOME", Path(".local/state"))


def _folder(variable: str, below_home: Path) -> Path:
    """A folder named by a variable, or below the home. A relative path is ignored, as it would depend on the cwd."""
    named = Path(os.environ.get(variable, ""))
    if named.is_absolute():
        return named / "realizar"
    home = Path(os.environ.get("HOME", ""))
    if not home.is_absolute():
        home = _home_of_account()
    return home / below_home / "realizar"


def _home_of_account() -> Path:
    if sys.platform != "win32":
        import pwd

        try:
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        except KeyError:
            home = Path()
        if home.is_absolute():
            return home
    raise HubError(
        "there is no place for caches: neither XDG_CACHE_HOME nor HOME is an absolute path, and the user has no home"
    )
