"""`Place`: the share of the machine that a replica gets, and the machine's sides, as Linux tells of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from pathlib import Path

from realizar.backends.cgroup import read_text

_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: the numbers of its hardware threads, its socket, and the node of the memory at its side."""

    cpus: tuple[int, ...]
    socket: int = 0
    node: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its index in `cuda:N`.

    Attributes:
        node: the side of the machine that it is on; None if not known.
        kind: its name, as the driver gives it.
    """

    index: int
    node: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """A replica's share of the machine.

    Attributes:
        cores: that it runs on; none where it may run on all.
        is_shared: other replicas run on these cores too.
        gpus: that it has, one for each of its processes; none on the CPU.
    """

    cores: tuple[Core, ...]
    is_shared: bool = False
    gpus: tuple[Gpu, ...] = ()

    @property
    def label(self) -> str:
        parts = [" and ".join(self.devices)] if self.gpus else []
        if self.cores:
            nodes = ", ".join(str(node) for node in dict.fromkeys(core.node for core in self.cores))
            shared = ", shared with other replicas" if self.is_shared else ""
            cores = "1 core" if len(self.cores) == 1 else f"{len(self.cores)} cores"
            parts.append(f"{cores} on node {nodes} (CPUs {cpu_list(self.cpus)}){shared}")
        return ", ".join(parts)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(f"cuda:{gpu.index}" for gpu in self.gpus)

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))


def cpu_list(cpus: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def places_on_cores(cores: Sequence[Core], num_replicas: int) -> tuple[Place, ...]:
    """Divide cores, one at least, equally between replicas, each on one side of the machine if possible.

    Cores that are left over stay free for the process that answers requests. Where there are fewer cores than replicas,
    each replica gets one, which it shares.
    """
    ordered = sorted(cores, key=lambda core: (core.node, core.socket, core.cpus))
    if num_replicas > len(cores):
        return tuple(Place((ordered[number % len(ordered)],), is_shared=True) for number in range(num_replicas))
    share = len(cores) // num_replicas
    nodes = [list(node) for _, node in groupby(ordered, key=lambda core: core.node)]
    rooms = [node[start : start + share] for node in nodes for start in range(0, len(node) - share + 1, share)]
    if len(rooms) < num_replicas:  # one side has not room enough for its replicas: some lie across
        rooms = [ordered[start : start + share] for start in range(0, num_replicas * share, share)]
    return tuple(Place(tuple(room)) for room in _spread(rooms, num_replicas))


def _spread(rooms: Sequence[Sequence[Core]], count: int) -> list[Sequence[Core]]:
    """`count` of the rooms, from each side of the machine equally many, in the order of sides."""
    by_node = [list(there) for _, there in groupby(rooms, key=lambda room: room[0].node)]
    taken = [room for turn in zip_longest(*by_node) for room in turn if room is not None]
    return sorted(taken[:count], key=lambda room: (room[0].node, room[0].cpus))


def gpu_groups(gpus: Sequence[Gpu], size: int, count: int) -> list[tuple[Gpu, ...]]:
    """The first `count` groups of `size` GPUs of one kind, or fewer where there are no more; no GPU is in two.

    Each lies on one side of the machine if there are enough such groups.
    """
    near = _groups_alike(gpus, size, lambda gpu: (gpu.kind, gpu.node))
    return (near if len(near) >= count else _groups_alike(gpus, size, lambda gpu: gpu.kind))[:count]


def _groups_alike(gpus: Sequence[Gpu], size: int, key: Callable[[Gpu], object]) -> list[tuple[Gpu, ...]]:
    groups: list[tuple[Gpu, ...]] = []
    for value in dict.fromkeys(map(key, gpus)):
        alike = [gpu for gpu in gpus if key(gpu) == value]
        groups += [tuple(alike[start : start + size]) for start in range(0, len(alike) - size + 1, size)]
    return sorted(groups, key=lambda group: group[0].index)


def places_on_gpus(groups: Sequence[tuple[Gpu, ...]], cores: Sequence[Core]) -> tuple[Place, ...]:
    """Give each replica a group of GPUs, and the cores at their side, divided between the replicas that are there.

    One whose GPUs are on several sides, or on one that is not known, may run on all cores. There is one core at least.
    """
    places: dict[tuple[Gpu, ...], Place] = {}
    for node in dict.fromkeys(map(_node_of, groups)):
        there = [group for group in groups if _node_of(group) == node]
        near = [core for core in cores if core.node == node]
        if node is None or not near:
            places |= {group: Place((), gpus=group) for group in there}
            continue
        for group, place in zip(there, places_on_cores(near, len(there)), strict=True):
            places[group] = Place(place.cores, place.is_shared, group)
    return tuple(places[group] for group in groups)


def _node_of(group: Sequence[Gpu]) -> int | None:
    nodes = {gpu.node for gpu in group}
    return nodes.pop() if len(nodes) == 1 else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """The numbers of a list such as `0-3,8`; none of an empty or malformed one."""
    found: list[int] = []
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match:
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)


def read_cores(allowed: Collection[int], system: Path = _SYSTEM) -> tuple[Core, ...]:
    """The physical cores that have hardware threads among the allowed ones, with those of their threads.

    Where the system does not say which threads are of one core, each counts as a core; without sides there is one.
    """
    nodes: dict[int, int] = {}
    for folder in sorted((system / "node").glob("node[0-9]*")):
        nodes |= dict.fromkeys(parse_cpu_list(read_text(folder / "cpulist")), int(folder.name[4:]))
    cores: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(allowed):
        topology = system / "cpu" / f"cpu{cpu}" / "topology"
        siblings = parse_cpu_list(read_text(topology / "thread_siblings_list")) or (cpu,)
        package = read_text(topology / "physical_package_id")
        cpus = tuple(each for each in siblings if each in allowed)
        cores[siblings] = Core(cpus, int(package) if package.isdecimal() else 0, nodes.get(cpu, 0))
    return tuple(cores.values())


def gpu_node(bus_id: str, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The side of the machine that a PCI device is on; None where the system does not say."""
    text = read_text(devices / bus_id.lower() / "numa_node")
    return int(text) if text.isdecimal() else None
