"""Memory that is free: what the system and the control group would give, and not what happens to be unused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from realizar.backends import machine
from realizar.backends.cgroup import MemoryLimit

MEMINFO = "MemTotal:       24000000 kB\nMemFree:          300000 kB\nMemAvailable:   20000000 kB\nCached: 19000000 kB\n"


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever limits hold where the tests run; a line that was logged may be logged again."""
    monkeypatch.setattr(machine, "memory_limit", lambda: None)
    monkeypatch.setattr(machine, "processor_quota", lambda: None)
    machine._log_once.cache_clear()
    yield
    machine._log_once.cache_clear()


def test_files_kept_for_later_reads_are_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_text", lambda path: MEMINFO if path == Path("/proc/meminfo") else "")
    assert machine.free_memory_bytes() == 20_000_000 * 1024


def test_a_system_that_does_not_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "read_text", lambda _path: "")
    assert machine.free_memory_bytes() == machine.memory_bytes() // 2 > 0


def test_no_more_is_free_than_the_control_group_may_use(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "read_text", lambda path: MEMINFO if path == Path("/proc/meminfo") else "")
    monkeypatch.setattr(machine, "memory_limit", lambda: MemoryLimit(2_000_000, 1_500_000))
    with caplog.at_level(logging.INFO):
        assert machine.free_memory_bytes() == 1_500_000
        assert machine.read_machine().memory_bytes == machine.memory_bytes() == 2_000_000
        machine.memory_bytes()
    assert len(caplog.records) == 1
    assert "the control group of this process may use 2.0 MB of the machine's" in caplog.text


def test_a_control_group_that_is_full_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full group is not taken for a system that gives no limit."""
    monkeypatch.setattr(machine, "read_text", lambda path: MEMINFO if path == Path("/proc/meminfo") else "")
    monkeypatch.setattr(machine, "memory_limit", lambda: MemoryLimit(2_000_000, 0))
    assert machine.free_memory_bytes() == 1


@pytest.mark.parametrize(("quota", "threads"), [(None, 8), (16.0, 8), (8.0, 8), (7.9, 7), (2.0, 2), (1.5, 1), (0.5, 1)])
def test_a_quota_of_processor_time_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, quota: float | None, threads: int
) -> None:
    monkeypatch.setattr(machine, "physical_cores", lambda: 8)
    monkeypatch.setattr(machine, "processor_quota", lambda: quota)
    with caplog.at_level(logging.INFO):
        assert machine.default_threads() == threads
    assert bool(caplog.records) == (threads != 8)
