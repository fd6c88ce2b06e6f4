"""The folder of compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from realizar.backends.cpu.kernel_cache import cache_folder, forget_old_folders


def test_folders_used_last_stay(tmp_path: Path) -> None:
    for age, name in enumerate(("newest", "newer", "old", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel").write_bytes(b"code")
        os.utime(tmp_path / name, (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "file").write_text("not a folder")
    forget_old_folders(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "newer", "newest"]


def test_folder_is_named_by_the_sources() -> None:
    assert cache_folder() == cache_folder()
    assert cache_folder().parent.name == "kernels"
