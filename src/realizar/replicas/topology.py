"""The sides of this machine, as Linux tells of them: cores, sockets and nodes of memory. Standard library only."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from realizar.replicas.places import Core

_SYSTEM = Path("/sys/devices/system")


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a list such as `0-3,8`; none of an empty or malformed one."""
    found: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match:
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)


def allowed_cpus() -> frozenset[int]:
    """Hardware threads that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def read_cores(allowed: Collection[int], system: Path = _SYSTEM) -> tuple[Core, ...]:
    """The physical cores that have hardware threads among the allowed ones, with those of their threads.

    Where the system does not say which threads are of one core, each counts as a core; without sides there is one.
    """
    nodes: dict[int, int] = {}
    for folder in sorted((system / "node").glob("node[0-9]*")):
        nodes |= dict.fromkeys(parse_cpu_list(_read(folder / "cpulist")), int(folder.name[4:]))
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        topology = system / "cpu" / f"cpu{cpu}" / "topology"
        siblings = parse_cpu_list(_read(topology / "thread_siblings_list")) or (cpu,)
        package = _read(topology / "physical_package_id")
        cpus = tuple(each for each in siblings if each in allowed)
        cores[siblings] = Core(cpus, int(package) if package.isdecimal() else 0, nodes.get(cpu, 0))
    return tuple(cores.values())


def gpu_node(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The side of the machine that a PCI device is on; None where the system does not say."""
    text = _read(devices / bus_id.lower() / "numa_node")
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
