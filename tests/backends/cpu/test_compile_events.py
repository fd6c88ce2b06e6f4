"""Compilation is reported where it happens, and not where a compiled kernel is read from its cache."""

from __future__ import annotations

from pathlib import Path

import numba
import pytest

from realizar.backends.cpu import kernel_library
from realizar.backends.cpu.instruction_set import select
from realizar.backends.cpu.kernel_library import KernelLibrary


def test_only_what_is_compiled_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    reported: list[str] = []
    for _ in range(2):  # as two processes: the second finds what the first left in the cache
        monkeypatch.setattr(kernel_library, "_MADE", {})
        library = KernelLibrary(select(), reported.append)
        assert library.activate("silu", gated=True) == library.activate("silu", gated=True)
    assert reported == ["activate"]
