"""Memory that is free: what the system would give, and not what happens to be unused."""

from __future__ import annotations

from pathlib import Path

import pytest

from realizar.backends import machine
from realizar.backends.cpu.kv.memory import free_memory_bytes

MEMINFO = "MemTotal:       24000000 kB\nMemFree:          300000 kB\nMemAvailable:   20000000 kB\nCached: 19000000 kB\n"


def test_files_kept_for_later_reads_are_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: MEMINFO if path == Path("/proc/meminfo") else "")
    assert free_memory_bytes() == 20_000_000 * 1024


def test_a_system_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda _path: "")
    assert free_memory_bytes() == machine.memory_bytes() // 2 > 0
