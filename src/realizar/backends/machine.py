"""Facts of the machine: processor, physical cores, caches, memory. Standard library only."""

from __future__ import annotations

import logging
import math
import os
import platform
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from realizar.backends.cgroup import memory_limit, processor_quota, read_text
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_CPU_FOLDER = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, as the system reports it; None or 0 where it does not.

    Attributes:
        physical_cores: that this process may run on. logical_cores: hardware threads of those.
        cache_bytes: `L1d`, `L2`, `L3` ... of one core's view (the first core's).
        memory_bytes, available_bytes: RAM, and what is free for a new process, within this process's control group.
    """

    processor: str
    physical_cores: int
    logical_cores: int
    cache_bytes: dict[str, int]
    memory_bytes: int
    available_bytes: int


def read_machine() -> Machine:
    memory, limit = _memory(), memory_limit()
    total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    if limit is not None:
        total = min(total, limit.limit_bytes)
        available = max(1, min(available, limit.free_bytes)) if available else 0  # 0 where the system reports none
    return Machine(
        processor=_processor(),
        physical_cores=physical_cores(),
        logical_cores=len(allowed_cpus()),
        cache_bytes=_caches(),
        memory_bytes=total,
        available_bytes=available,
    )


def physical_cores() -> int:
    """Cores this process may run on, hardware threads of one core counted once."""
    cores = set()
    for cpu in allowed_cpus():
        siblings = read_text(_CPU_FOLDER / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.add(siblings or str(cpu))
    return max(len(cores), 1)


def allowed_cpus() -> set[int]:
    """The hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


@cache
def num_processors() -> int:
    """How many hardware threads this process may use at once: those that it may run on, within its quota of time."""
    return max(1, int(min(len(allowed_cpus()), processor_quota() or math.inf)))


def _processor() -> str:
    info = read_text(Path("/proc/cpuinfo"))
    match = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _caches() -> dict[str, int]:
    """Bytes by level of the caches that the first core sees; instruction caches left out."""
    found = {}
    for folder in sorted((_CPU_FOLDER / "cpu0" / "cache").glob("index*")):
        kind, level, size = (read_text(folder / name) for name in ("type", "level", "size"))
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if match and kind != "Instruction":
            factor = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match.group(2)]
            found[f"L{level}{'d' if kind == 'Data' else ''}"] = int(match.group(1)) * factor
    return found


def _memory() -> dict[str, int]:
    return {
        name: int(kilobytes) * 1024
        for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", read_text(Path("/proc/meminfo")), re.MULTILINE)
    }


def resident_bytes() -> int:
    """Memory that this process has, pages of files that it reads among it; 0 where the system does not say."""
    pages = read_text(Path("/proc/self/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def memory_bytes() -> int:
    """All memory that this process can have: the machine's, or what its control group may use if that is less."""
    installed, limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), memory_limit()
    if limit is None or limit.limit_bytes >= installed:
        return installed
    _log_once(
        f"the control group of this process may use {format_bytes(limit.limit_bytes)} of the machine's"
        f" {format_bytes(installed)} of memory: no more is planned with"
    )
    return limit.limit_bytes


def free_memory_bytes() -> int:
    """Memory that the system can give without swapping, files it keeps included; half of all where it reports none."""
    return read_machine().available_bytes or memory_bytes() // 2


def default_threads() -> int:
    """Threads that the CPU backend takes where none are configured: the physical cores, or a smaller quota.

    Threads meet at barriers: more of them than may run at once would wait for each other's turns.
    """
    cores, quota = physical_cores(), processor_quota()
    if quota is None or quota >= cores:
        return cores
    threads = max(1, int(quota))
    _log_once(
        f"the control group of this process may use {quota:.3g} of {cores} cores: threads are {threads} unless"
        " configured"
    )
    return threads


@cache
def _log_once(text: str) -> None:
    _LOG.info("%s", text)
