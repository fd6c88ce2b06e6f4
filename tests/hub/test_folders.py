"""The folders of files, for any environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from realizar.errors import HubError
from realizar.hub.folders import user_cache, user_data


def test_named_folders_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/a")
    monkeypatch.setenv("XDG_DATA_HOME", "/b")
    assert (user_cache(), user_data()) == (Path("/a/realizar"), Path("/b/realizar"))


@pytest.mark.parametrize("named", [None, "", "relative", "./x"])
def test_the_home_comes_next(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
        if named is not None:
            monkeypatch.setenv(variable, named)
    monkeypatch.setenv("HOME", "/home/me")
    assert (user_cache(), user_data()) == (Path("/home/me/.cache/realizar"), Path("/home/me/.local/share/realizar"))


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_home_that_is_no_path_is_the_accounts(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert user_cache() == Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "realizar"

    def unknown(_uid: int) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(HubError, match="no place for caches"):
        user_cache()
