"""The folder of compiled kernels, and what happens where it can't be written or is broken."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import caching

import realizar
from realizar.backends.cpu import kernel_cache
from realizar.backends.cpu.kernel_cache import cache_folder, forget_old_folders, is_kept, use_cache_folder
from waits import HANG_S


def test_folders_used_last_stay(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "newer", "old", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel").write_bytes(b"code")
        os.utime(tmp_path / name, (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "file").write_text("not a folder")
    forget_old_folders(tmp_path, tmp_path / "newest", keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "newer", "newest", "old"]
    forget_old_folders(tmp_path, tmp_path / "old", keep=2)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["file", "newest", "old"], "its own stays, whatever the clock says"


def test_folder_is_named_by_the_sources() -> None:
    assert cache_folder() == cache_folder()
    assert cache_folder().parent.name == "kernels"


def test_another_installation_finds_the_kernels(tmp_path: Path) -> None:
    """Two copies of the package, run one after the other: the second compiles nothing."""
    code = (
        "from numba.core import event\n"
        "passes = event.RecordingListener()\n"
        "event.register('numba:run_pass', passes)\n"
        "from realizar.backends.cpu import threads\n"
        "print(threads.__file__, len(passes.buffer), sep='\\n')\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    passes = []
    for name in ("first", "second"):
        shutil.copytree(Path(realizar.__file__).parent, tmp_path / name / "realizar")
        command = [sys.executable, "-c", code]
        result = subprocess.run(
            command,
            env={**environment, "PYTHONPATH": str(tmp_path / name)},
            capture_output=True,
            text=True,
            check=True,
            timeout=HANG_S,
        )
        place, count = result.stdout.splitlines()
        assert Path(place).is_relative_to(tmp_path / name)
        passes.append(int(count))
    assert passes[0] > 0
    assert passes[1] == 0


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Warnings of a process that has given none yet."""
    monkeypatch.setattr(kernel_cache, "_REPORTED", [])
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("place", ["file", "below a file", "no home"])
def test_without_a_place_kernels_are_not_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    folder = numba.config.CACHE_DIR
    (tmp_path / "file").write_text("")
    named = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "below", "no home": Path()}[place]
    monkeypatch.setenv("XDG_CACHE_HOME", str(named))
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for _ in range(2):
        assert use_cache_folder.__wrapped__() is None
    assert len(warnings()) == 1
    assert "can't be written" in warnings()[0]
    assert folder == numba.config.CACHE_DIR
    monkeypatch.setattr(kernel_cache, "use_cache_folder", lambda: None)
    assert not is_kept()


def triple() -> Any:
    """Compiled now, and the same function each time as far as the cache can tell."""

    @numba.njit("int64(int64)", cache=True)
    def triple(number: int) -> int:
        return 3 * number

    return triple


def full_disk(*_arguments: object, **_options: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up(monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(triple()._cache._cache_file._index_path).unlink()
    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", full_disk)
    monkeypatch.setattr("tempfile.TemporaryFile", full_disk)
    assert [triple()(7), triple()(8)] == [21, 24]
    assert warnings() == [
        "the kernel cache can't be written ([Errno 28] No space left on device); this process compiles its own kernels"
    ]


@pytest.mark.parametrize("content", [b"", b"broken", b"\x80\x05N."])
@pytest.mark.parametrize("what", ["index", "code"])
def test_a_broken_file_is_written_anew(what: str, content: bytes, warnings: Callable[[], list[str]]) -> None:
    file = triple()._cache._cache_file
    path = Path(file._index_path if what == "index" else file._data_path(next(iter(file._load_index().values()))))
    whole = path.read_bytes()
    path.write_bytes(content)
    assert triple()(7) == 21, "compiled in memory"
    assert len(warnings()) <= 1
    assert triple()(7) == 21, "and kept again"
    assert path.stat().st_size >= len(whole) // 2
    assert triple()._cache_hits, "and found"
